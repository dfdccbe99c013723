"""What README.md says about the features is what they say themselves."""

import re
from pathlib import Path

from lldecode import flags, registry

ROW = re.compile(r"\| \[([a-z0-9-]+)\]\(.* \| `(\w+)`, `(\w+)` \|")


def test_feature_table_has_the_flag_and_the_default_of_each():
    text = Path(__file__).parent.parent.joinpath("README.md").read_text()
    found = {name: (flag, default) for name, flag, default in ROW.findall(text)}
    assert found == {name: (flags.env_name(name), registry.load(point).default) for name, point in registry.entry_points().items()}
