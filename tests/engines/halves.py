"""SmolLM2 with half-precision weights, for tests that compare log probabilities.

With quantized weights llama.cpp rounds activations to eight bits, so log probabilities vary by 0.2 with the order of
additions. With half precision they vary by 0.01, which is small enough to detect a wrong token.
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
