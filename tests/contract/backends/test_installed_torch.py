"""Versions of torch: one that is too old is refused."""

from __future__ import annotations

from support.programs import output


def test_a_torch_that_is_too_old_is_refused_by_name_when_its_parts_are_imported() -> None:
    script = """if True:
        import torch
        del torch.accelerator
        torch.__version__ = "2.5.1"
        import hybridloader
        hybridloader.Pipeline, hybridloader.get_worker_info
        for name in "DataLoader", "StatefulDataLoader", "sampling":
            try:
                getattr(hybridloader, name).ShuffleSampler
            except ImportError as error:
                print(error)
    """
    told = output("-c", script).splitlines()
    assert len(told) == 3
    for line in told:
        assert line.startswith("hybridloader needs torch 2.6 or later, and this Python has torch")
        assert "2.5.1" in line
        assert "pip install -U 'torch>=2.6'" in line
