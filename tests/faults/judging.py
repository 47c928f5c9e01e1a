"""Whether what ranks have told of a fault of another is what it should be."""

import re

from tests.faults.stage import LIMIT


def problem(scene, told):
    """Say what is wrong about what the others have told, if anything is."""
    fault, _, _, _, culprit, *_ = scene.split()
    for rank, one in told.items():
        if "kind" not in one or not one["ended"]:
            return f"rank {rank} has not raised, or not ended: {one}"
        if one["kind"] != "CommunicationError":
            return f"rank {rank} has raised {one}"
        if one["seconds"] > LIMIT + 5:
            return f"rank {rank} has taken {one['seconds']} s"
        # torch's store has no time limit of its own: who asks one that is stopped cannot be ended
        asks = scene.startswith("stop") and culprit == "0" and len(one["threads"]) == 1
        if one["threads"] and not (asks and one["threads"][0].endswith("(asking)")):
            return f"rank {rank} has threads left: {one['threads']}"
        message = one["message"]
        if fault == "close" and "so all have come to it, and the network" in message:
            continue  # if not, the rank that is cut off has not noticed yet
        named = rf"\brank {culprit} (not come to it, gone, or cut off|ended with \w+: )"
        store = "the store in which ranks met has ended"
        if not (re.search(named, message) or (culprit == "0" and store in message)):
            return f"rank {rank} does not name rank {culprit}: {message}"
        ends = {"fail": "KeyError: 'something of the user's'", "exhaust": "RuntimeError: "}
        if culprit != "0" and ends.get(fault, "") not in message.replace('"', "'"):
            return f"rank {rank} does not say how rank {culprit} ended: {message}"
    return ""
