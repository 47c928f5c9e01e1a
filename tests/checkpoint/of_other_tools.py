"""Folders of tensors as Hugging Face writes them."""

import json

from safetensors.torch import save_file


def write(folder, tensors, files=1):
    """Write one file, or some with an index."""
    folder.mkdir()
    if files == 1:
        return save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weight_map, names = {}, list(tensors)
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        some = names[number::files]
        save_file({name: tensors[name] for name in some}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
