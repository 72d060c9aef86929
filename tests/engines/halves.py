"""SmolLM2 with its weights as half floats, for tests that compare log probabilities.

Weights of a few bits make llama.cpp round to eight bits before each matrix, and rounding makes large of small: two ways
to add the same numbers up differ by 0.2 in the logarithm of a probability. With half floats they differ by 0.01, so
that a token that is wrong somewhere is seen.
"""

from pathlib import Path

import gguf
import numpy as np


def write_halves(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float16 if len(tensor.shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
