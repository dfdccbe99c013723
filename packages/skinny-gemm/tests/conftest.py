import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def emulate() -> ModuleType:
    """The module beside this file; ``--import-mode=importlib`` puts no test folder on the path."""
    spec = importlib.util.spec_from_file_location("skinny_gemm_emulate", Path(__file__).with_name("emulate.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
