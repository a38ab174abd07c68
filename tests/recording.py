"""A recorder for the CPU, which does what a CUDA graph does on a GPU.

The recording is the list of PyTorch's operations in a step, and of the tensors that they got and gave. Repeating the
list runs no other code of the step, as a CUDA graph runs none.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """The operations of PyTorch within the block, as (operation, what it got, what it gave).

    ``before`` has what was in the memory that they changed.
    """

    def __init__(self):
        super().__init__()
        self.done = []
        self.before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for i, declared in enumerate(func._schema.arguments):
            given = args[i] if i < len(args) else kwargs.get(declared.name)
            if declared.alias_info is not None and declared.alias_info.is_write:
                for tensor in tensors(given):
                    memory = tensor.untyped_storage()
                    self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        gave = func(*args, **kwargs)
        self.done.append((func, args, kwargs, gave))
        return gave


class Recording:
    """A recorder for tests; it counts steps that were done, recorded and repeated."""

    def __init__(self):
        self.steps = self.recorded = self.repeated = 0

    def warm_up(self, step):
        self.steps += 1
        step()

    def record(self, step):
        self.recorded += 1
        with Operations() as operations:
            step()
        for memory, before in operations.before.values():  # CUDA records a step without doing it
            memory.copy_(before)

        def repeat():
            self.repeated += 1
            with torch._C._AutoDispatchBelowAutograd():  # the list has the operations of the gradients, too
                for func, args, kwargs, gave in operations.done:
                    again = func(*args, **kwargs)
                    for old, new in zip(tensors(gave), tensors(again), strict=True):
                        if old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return repeat


def tensors(value):
    """The tensors of what an operation got or gave."""
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, torch.Tensor)]
