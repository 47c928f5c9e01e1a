"""Print habits of style in changed lines: `python docs/check_prose.py [COMMIT]`.

It reads pages, docstrings, comments and messages. The changed lines are those since the commit,
by default the last one that this branch shares with main. The exit status is always 0.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize

WORDS = 30  # per sentence
COLUMNS = 84  # of code on a page: the built page cuts wider lines

AMOUNTS = (
    "bytes|rows|messages|times|copy|file|thread|numbers?|entry|value|one|seconds?|m?s|[KMG]i?B"
)
HABITS = {
    "name the thing": r"\b(nobody|somebody|whoever|whatever)\b|^(What|Who|Where)\b[^?]*$",
    "software does not talk or know": r"(?i)\b(tells?|told|believed?|knows|hears?)\b",
    "write per": rf"\b({AMOUNTS}) an? (rank|row|step|layer|call|token|node|atom|second)\b",
    "return a noun": r"\bReturn (what|how|who|which)\b",
    "write inside or outside": r"\b(inside|outside) of\b",
    "write the plain word": r"\b(anew|mend|alike|shared out|under way|will do|nor|tell apart)\b",
    "write use": r"(?:^|[.:;] )Take (?!away)",
    "name the subject": r"^(That|Those) of\b",
    "name the object": r"\b(of|by|in|from|for|with|than|compare|says?|sees?|shows?|is|are) what\b",
    "write each": r"\b(them|these) each\b",
    "repeat the noun": r"\b(is|are|be) (that|those) of\b",
    "write is not": r"(?<![Tt]here )\b(is|are) no (?!longer\b)",
    "write return or another verb": r"\bgives?\b",
    "write the number": r"\bso (many|much)\b",
    "write also or should": r"\b(besides|shall)\b",
    "write without idiom": r"\b(off the root|turned round|narrow floats?|once more|many a)\b",
    "write continue": r"\b(go|goes|went) on\b",
    "a heading is a task or a noun": r"^#+ (What|Where|Who|When)\b",
}
# the end of a sentence
END = re.compile(r"(?:(?<=[.!?:])|(?<=[.][)*])|(?<=[.]\*\*)) (?=[A-Z*])")
# a line that begins a paragraph: a heading, a list item, a row of a table
BEGINS = re.compile(r"#|\||[-*] |\d+\. ")


def git(*arguments):
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def changed_lines(commit):
    """Return the line numbers that differ from a commit, by file; of a new file, all lines."""
    changed, path = {}, None
    for line in git("diff", "--unified=0", "--no-color", commit).splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            changed.setdefault(path, set()).update(range(first, first + count))
    for path in git("ls-files", "--others", "--exclude-standard").splitlines():
        changed[path] = set(range(1, 100_000))
    return {path: lines for path, lines in changed.items() if path != "/dev/null" and lines}


def of_page(source):
    """Return the prose and the code of a page, each by line number."""
    prose, code, fence, hidden = {}, {}, None, False
    for number, line in enumerate(source.splitlines(), 1):
        if fence:
            fence = None if line.rstrip() == fence else fence
            code |= {number: line} if fence else {}
        elif opening := re.match(r"(`{3,})", line):
            fence = opening[1]
        elif hidden or line.startswith("<!--"):
            hidden = "-->" not in line
        elif line.startswith("    "):
            code[number] = line
        elif not line.startswith((":::", ":link", ".. ", "   :")):
            prose[number] = line
    return prose, code


def of_docstring(text, first):
    """Return the prose of a docstring by line number: no examples, titles or types of sections."""
    prose, skipped, literal = {}, False, False
    lines = text.splitlines()
    inner = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    indent = min(inner, default=0)
    for number, line in enumerate(lines):
        body = line[indent:] if number else line
        following = lines[number + 1].strip() if number + 1 < len(lines) else ""
        skipped = body.startswith(">>>") or (skipped and bool(body.strip()))
        literal = literal and (not body.strip() or body.startswith("    "))
        is_title = re.fullmatch(r"-{3,}|={3,}", following) or re.fullmatch(r"[-=]{3,}", body)
        is_type = re.fullmatch(r"(\S.* : .*|\w*(Error|Graph)\w*(, \w+Error)*|dict of .*)", body)
        if not (skipped or literal or is_title or is_type):
            prose[first + number] = body.strip()
        literal = literal or body.endswith("::")
    return prose


def of_module(source):
    """Yield the prose of docstrings, comments and messages, each by line number."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            value = node.body[0].value
            yield of_docstring(value.value, value.lineno)
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield {part.lineno: part.value}
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words = {token.start[0]: token.string.lstrip("#:% ")}
            if token.line.lstrip().startswith("#"):
                comments |= words
            else:  # beside code, where the next line has a comment of its own
                yield words
    yield comments


def sentences_of(prose):
    """Yield each sentence, and the line numbers between which it stands."""
    paragraph = []
    for number in [*sorted(prose), None]:
        line = "" if number is None else prose[number].strip()
        follows = paragraph and number == paragraph[-1][0] + 1
        if paragraph and (not line or not follows or BEGINS.match(line)):
            yield from split(paragraph)
            paragraph = []
        if line:
            paragraph.append((number, line))


def split(paragraph):
    """Yield the sentences of a paragraph; inline code counts as a word."""
    starts, text = [], ""
    for number, line in paragraph:
        starts.append((len(text), number))
        text += line + " "
    # of the same length, so that places in the text stay
    text = re.sub(r"``?[^`]+``?", lambda code: "Code".ljust(len(code[0]), "\0"), text)
    text = re.sub(r"\]\([^)]*\)", lambda link: "]".ljust(len(link[0]), "\0"), text)
    for cell in re.finditer(r"[^|]+", text):
        place = cell.start()
        for sentence in END.split(cell[0]):
            within = [number for start, number in starts if start < place + len(sentence)]
            first = max(number for start, number in starts if start <= place)
            yield " ".join(sentence.replace("\0", "").split()), range(first, within[-1] + 1)
            place += len(sentence) + 1


def problems(path, source):
    """Yield the line numbers of each problem, the problem and the sentence or line of code."""
    if path.endswith(".py"):
        texts, code = of_module(source), {}
    else:
        prose, code = of_page(source)
        texts = [prose]
    for prose in texts:
        for sentence, lines in sentences_of(prose):
            for advice, sign in HABITS.items():
                if re.search(sign, sentence):
                    yield lines, advice, sentence
            if len(sentence.split()) > WORDS:
                yield lines, f"{len(sentence.split())} words", sentence
    for number, line in code.items():
        if len(line) > COLUMNS:
            yield range(number, number + 1), f"{len(line)} columns of code", line


def main(commit=None):
    commit = commit or git("merge-base", "HEAD", "main").strip() or "HEAD"
    for path, changed in sorted(changed_lines(commit).items()):
        if not path.endswith((".md", ".rst", ".py")) or path.startswith("tests/"):
            continue
        with open(path, encoding="utf-8") as file:
            source = file.read()
        found = [problem for problem in problems(path, source) if changed & {*problem[0]}]
        for lines, advice, text in sorted(found, key=lambda problem: problem[0][0]):
            print(f"{path}:{lines[0]}: {advice}: {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
