"""march for Python: models, their memory, training, evaluation and operations.

>>> import march_lm
>>> model = march_lm.load()  # the model inside the package; or a folder, a GGUF file, a preset
>>> bank = model.bank()
>>> bank.read("3 May: the key is in the barn. That was 3 May. ")
>>> "".join(bank.generate("Where was the key on 3 May?", 8, temperature=0.0))
' barn'

Work runs without the GIL, and Ctrl-C stops it between calls of the model. Arrays are those of numpy; what goes in may be
anything that numpy can read, lists, `__array__` or DLPack on the CPU, and `torch.from_dlpack` takes what comes out.

`march_lm.ops` has operations for models of your own, `march_lm.torch` the same for PyTorch with a layer of MARCH, and
`march_lm.lm_eval` a model for lm-evaluation-harness.
"""

from march_lm import ops
from march_lm._march import EXAMPLE, Bank, Error, Model, Pieces, Routing, load, metrics, presets, train

__all__ = ["EXAMPLE", "Bank", "Error", "Model", "Pieces", "Routing", "load", "metrics", "ops", "presets", "train"]
