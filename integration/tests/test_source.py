import sys

import pytest

from lldecode import source


def test_follows_imports_without_importing(host):
    host.write("a", "def f():\n    return 1\n")
    host.write("b", "from .a import f as g\n")
    host.write("c", f"from {host.name}.b import g\n")
    found = source.definition(host.target("c:g"))
    assert found.module == f"{host.name}.a"
    assert found.hash == source.definition(host.target("a:f")).hash
    assert not [m for m in sys.modules if m.startswith(host.name)]


def test_follows_an_imported_class(host):
    host.write("a", "class C:\n    def m(self):\n        return 1\n")
    host.write("b", "from .a import C\n")
    assert source.definition(host.target("b:C.m")) == source.definition(host.target("a:C.m"))


def test_relative_import_in_a_package_init(host):
    (host.dir / "sub").mkdir()
    host.write("sub/__init__", "from ..a import f\nfrom .inner import g\n")
    host.write("sub/inner", "def g(): ...\n")
    host.write("a", "def f(): ...\n")
    assert source.definition(host.target("sub:f")).module == f"{host.name}.a"
    assert source.definition(host.target("sub:g")).module == f"{host.name}.sub.inner"


def test_definitions_inside_blocks_are_all_hashed(host):
    text = "import sys\nif sys:\n    def f():\n        return {}\nelse:\n    def f():\n        return 2\n"
    text += "try:\n    X = 1\nexcept OSError:\n    X = 2\n"
    host.write("a", text.format(1))
    first = source.definition(host.target("a:f")).hash
    host.write("a", text.format(3))
    assert source.definition(host.target("a:f")).hash != first
    assert source.definition(host.target("a:X")).hash != source.ABSENT


def test_indentation_and_trailing_space_do_not_matter(host):
    host.write("a", "def f():  \n    return 1\n")
    host.write("b", "if True:\n    def f():\n        return 1\n")
    assert source.definition(host.target("a:f")).hash == source.definition(host.target("b:f")).hash


def test_a_form_feed_does_not_shift_the_lines(host):
    text = "def f():\n    return 1\n\x0c\ndef g():\n    return {}\n"
    host.write("a", text.format(1))
    first = source.definition(host.target("a:g")).hash
    host.write("a", text.format(2))
    assert source.definition(host.target("a:g")).hash != first


def test_a_source_that_cannot_be_read_is_not_found(host):
    (host.dir / "a.py").write_bytes(b"def f(:\n")
    (host.dir / "b.py").write_bytes(b"x = '\xff'\n")
    for module in "ab":
        with pytest.raises(source.NotFoundError, match="cannot be read"):
            source.definition(host.target(f"{module}:f"))


def test_module_without_source_or_class(host):
    for target in ("_sre:compile", "no_such:f", host.target("nope:f"), host.target("nope.deeper:f")):
        with pytest.raises(source.NotFoundError):
            source.definition(target)


def test_package_sha_sees_every_byte_and_name(host):
    host.write("a", "x = 1\n")
    first = source.package_sha(host.name)
    host.write("a", "x = 2\n")
    second = source.package_sha(host.name)
    (host.dir / "a.py").rename(host.dir / "b.py")
    assert len({first, second, source.package_sha(host.name)}) == 3
