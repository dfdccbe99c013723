import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import affected
import gpu_bundle
import isolated_tests
import layout
import new_feature
import release

ROOT = Path(__file__).parents[1]
NAME = "sample-noun"


def git(root: Path, *args: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    return subprocess.run(["git", *identity, *args], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "change")


@pytest.fixture
def repository(workspace) -> Path:
    git(workspace, "init", "--quiet", "--initial-branch", "main")
    commit(workspace)
    return workspace


TRACKED = git(ROOT, "ls-files").splitlines()


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=240)


# affected


@pytest.mark.parametrize(
    ("path", "jobs"),
    [
        ("packages/a/src/lldecode_a/op.py", ["a"]),
        ("packages/a/README.md", ["a"]),
        ("packages/gone/pyproject.toml", ["lldecode", "a", "b"]),
        ("integration/src/lldecode/flags.py", ["lldecode", "a", "b"]),
        ("tests/test_layout.py", ["lldecode", "a", "b"]),
        ("tools/layout.py", ["lldecode", "a", "b"]),
        (".ci/run", ["lldecode", "a", "b"]),
        (".github/workflows/ci.yml", ["lldecode", "a", "b"]),
        ("pyproject.toml", ["lldecode", "a", "b"]),
        ("uv.lock", ["lldecode", "a", "b"]),
        ("README.md", ["lldecode"]),
        ("LICENSE", ["lldecode"]),
    ],
)
def test_affected(path, jobs):
    assert affected.affected([path], ["lldecode", "a", "b"]) == jobs


@pytest.mark.parametrize("path", ["docs/index.md", "setup.py", "packages/loose.txt", "packages", "tools", "Integration/x", ""])
def test_a_path_without_a_rule_is_an_error(path):
    with pytest.raises(ValueError, match="no rule says"):
        affected.affected(["README.md", path], ["lldecode", "a"])


def test_the_command_names_the_unknown_path():
    done = run("tools/affected.py", "README.md", "docs/index.md")
    assert (done.returncode, done.stdout) == (1, "") and "docs/index.md: no rule" in done.stderr
    done = run("tools/affected.py", "README.md")
    assert (done.returncode, json.loads(done.stdout)) == (0, ["lldecode"])


@given(st.lists(st.sampled_from(TRACKED)), st.lists(st.sampled_from(TRACKED)))
def test_every_tracked_file_has_a_rule_and_changes_add_up(some, more):
    every = affected.packages()
    both = affected.affected(some + more, every)
    assert set(both) == set(affected.affected(some, every)) | set(affected.affected(more, every))
    assert both == [name for name in every if name in both] and bool(both) == bool(some + more)


def test_no_tracked_file_is_without_a_rule():
    assert set(affected.affected(TRACKED, affected.packages())) == set(affected.packages())


def test_the_change_since_a_base(repository, monkeypatch):
    monkeypatch.setattr(affected, "ROOT", repository)
    git(repository, "checkout", "--quiet", "-b", "topic")
    git(repository, "mv", f"packages/{NAME}/README.md", "integration/mövéd.md")
    commit(repository)
    git(repository, "checkout", "--quiet", "main")
    (repository / "later.txt").write_text("not of the topic")
    commit(repository)
    git(repository, "checkout", "--quiet", "topic")
    assert affected.changed("main") == ["integration/mövéd.md", f"packages/{NAME}/README.md"]


# new_feature


@pytest.fixture(scope="module")
def scaffolded(tmp_path_factory) -> Path:
    return new_feature.scaffold("a-longer-name-than-the-template", tmp_path_factory.mktemp("workspace"))


def test_nothing_of_the_templates_name_is_left(scaffolded):
    text = "\n".join(f"{p}\n{p.read_text()}" for p in scaffolded.rglob("*") if p.is_file())
    assert "example" not in text.lower() and "LLDECODE_A_LONGER_NAME_THAN_THE_TEMPLATE" in text
    assert {p.relative_to(new_feature.TEMPLATE).parts[0] for p in new_feature.TEMPLATE.iterdir()} <= {p.name for p in scaffolded.iterdir()}


@pytest.mark.parametrize("command", [("check", "--no-cache"), ("format", "--check", "--no-cache")])
def test_the_scaffold_passes_lint(scaffolded, command):
    sources = f"src = ['{scaffolded}/src', '{ROOT}/integration/src']"
    done = run("-m", "ruff", *command, "--config", ROOT / "pyproject.toml", "--config", sources, scaffolded)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scaffolds_tests_pass(scaffolded, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(scaffolded / "src"))
    done = run("-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", scaffolded, "-p", "no:cacheprovider", scaffolded / "tests")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_the_command_says_what_comes_next(tmp_path):
    done = run("tools/new_feature.py", "fast-thing", "--root", tmp_path)
    assert done.returncode == 0 and 'fast-thing = ["lldecode-fast-thing>=0.1,<0.2"]' in done.stdout and "uv lock" in done.stdout
    assert (tmp_path / "packages/fast-thing/src/lldecode_fast_thing/vllm.py").exists()


@pytest.mark.parametrize("name", ["Fast", "fast_thing", "-fast", "fast-", "../x", "", "all", "vllm", NAME])
def test_a_name_that_is_taken_or_no_noun_is_refused(workspace, name):
    before = sorted(workspace.rglob("*"))
    with pytest.raises(ValueError, match="name: "):
        new_feature.scaffold(name, workspace)
    assert sorted(workspace.rglob("*")) == before


# release


def released(root: Path, folder: str = f"packages/{NAME}") -> None:
    """What `towncrier build` does to a package, committed."""
    for fragment in (root / folder / "changelog.d").glob("*.md"):
        fragment.unlink()
    with (root / folder / "CHANGELOG.md").open("a") as f:
        f.write("\n## 0.1.0 (2026-01-02)\n\n- First release.\n")
    commit(root)


def reconcile(root: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return run("tools/release.py", "--root", root, "--published", root / "../index", *args)


@pytest.fixture
def index(repository) -> Path:
    out = repository.parent / "index"
    out.mkdir()
    (out / "lldecode-0.1.0-py3-none-any.whl").touch()
    return out


def test_what_is_published_is_not_due(repository, index):
    assert [m.dist for m in release.due(repository, str(index))] == [f"lldecode-{NAME}"]
    (index / "lldecode_sample_noun-0.0.9.tar.gz").touch()
    assert [m.dist for m in release.due(repository, str(index))] == [f"lldecode-{NAME}"]
    (index / "lldecode_sample_noun-0.1.0-py3-none-any.whl").touch()
    done = reconcile(repository)
    assert (done.returncode, done.stdout) == (0, "nothing is due\n")


def test_a_release_builds_tags_and_is_done(repository, index):
    released(repository)
    assert reconcile(repository).stdout == f"due: lldecode-{NAME} 0.1.0\n"
    done = reconcile(repository, "--build", index)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in index.iterdir()} >= {"lldecode_sample_noun-0.1.0-py3-none-any.whl", "lldecode_sample_noun-0.1.0.tar.gz"}
    assert not list(index.glob("lldecode-0.1.0.tar.gz")), "a package that was not due was built"
    assert git(repository, "tag", "--points-at", "HEAD") == f"{NAME}-v0.1.0"
    assert reconcile(repository).stdout == "nothing is due\n"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda d: (d / "changelog.d/7.fixed.md").write_text("x"), "changelog fragments are pending: 7.fixed.md"),
        (lambda d: (d / "CHANGELOG.md").write_text("## 0.1.00 (2026-01-02)\n"), "CHANGELOG.md has no entry for 0.1.0"),
    ],
)
def test_a_package_that_is_not_ready_is_refused(repository, index, spoil, reason):
    released(repository)
    spoil(repository / "packages" / NAME)
    commit(repository)
    before = sorted(index.iterdir())
    done = reconcile(repository, "--build", index)
    assert done.returncode == 1 and done.stderr == f"refused: lldecode-{NAME}: {reason}\n"
    assert sorted(index.iterdir()) == before and not git(repository, "tag", "--list")


def test_a_dirty_tree_is_refused(repository, index):
    released(repository)
    (repository / "stray.txt").touch()
    done = reconcile(repository, "--build", index)
    assert done.returncode == 1 and "the tree is dirty:\n?? stray.txt" in done.stderr and not git(repository, "tag", "--list")


def test_a_tag_on_another_commit_is_refused(repository, index):
    git(repository, "tag", f"{NAME}-v0.1.0")
    released(repository)
    done = reconcile(repository, "--build", index)
    assert done.returncode == 1 and f"the tag {NAME}-v0.1.0 is on another commit" in done.stderr


def test_an_index_is_asked_for_its_files():
    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path == "/simple/lldecode-a/" and "json" in self.headers["Accept"]
            self.send_response(200 if found else 404)
            self.end_headers()
            if found:
                files = ["lldecode_a-0.1.0-py3-none-any.whl", "lldecode_a-0.2.0.tar.gz"]
                self.wfile.write(json.dumps({"files": [{"filename": f} for f in files]}).encode())

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/simple/"
        assert {str(v) for v in release.published(url, "lldecode-a")} == {"0.1.0", "0.2.0"}
        assert release.published(url, "lldecode-b") == set()
        server.shutdown()


# gpu_bundle

EXPORTED = """\
# a comment
rich==15.0.0 ; sys_platform == 'linux'
    # via lldecode
numpy==2.3.5 ; python_full_version < '3.12'
numpy==2.4.6 ; python_full_version >= '3.12' and sys_platform == 'linux'
pywin32==311 ; sys_platform == 'win32'
torch==2.11.0
"""


def test_select_takes_what_the_host_needs():
    assert gpu_bundle.select(EXPORTED, "3.12") == ["numpy==2.4.6", "rich==15.0.0", "torch==2.11.0"]
    assert gpu_bundle.select(EXPORTED, "3.11", ["NumPy"]) == ["numpy==2.3.5"]
    with pytest.raises(ValueError, match="--only: expected names of the lock, got pywin32"):
        gpu_bundle.select(EXPORTED, "3.12", ["pywin32"])


def test_split_pieces_join_to_the_archive(tmp_path):
    data = os.urandom(2500)
    (tmp_path / "bundle.tar").write_bytes(data)
    pieces = gpu_bundle.split(tmp_path / "bundle.tar", 1000)
    assert [p.name for p in pieces] == ["bundle.tar.00", "bundle.tar.01", "bundle.tar.02"]
    assert b"".join(p.read_bytes() for p in sorted(tmp_path.iterdir())) == data


# isolated_tests


def test_an_undeclared_import_fails_alone(workspace, capfd):
    feature = workspace / "packages" / NAME
    for path in (*feature.glob("src/*/*.py"), *feature.glob("tests/*.py")):
        path.unlink()
    pyproject = feature / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace(', "torch>=2.11"', ""))
    (feature / "src/lldecode_sample_noun/__init__.py").write_text("import filelock\n")
    (feature / "tests/test_import.py").write_text("def test_import():\n    import lldecode_sample_noun\n")
    member = layout.members(workspace)[NAME]
    subprocess.run(["uv", "lock", "--quiet"], cwd=workspace, check=True)
    assert isolated_tests.run(member, workspace) == 1
    assert "ModuleNotFoundError: No module named 'filelock'" in capfd.readouterr().out

    pyproject.write_text(pyproject.read_text() + '\n[dependency-groups]\ntest = ["filelock"]\n')
    subprocess.run(["uv", "lock", "--quiet"], cwd=workspace, check=True)
    assert isolated_tests.run(member, workspace) == 0


def test_isolated_tests_refuses_a_name_it_does_not_know():
    done = run("tools/isolated_tests.py", "nonesuch")
    assert done.returncode == 2 and "expected one of lldecode, " in done.stderr


# .ci/run


def test_ci_runs_the_readmes_commands():
    script = (ROOT / ".ci/run").read_text()
    function = script[script.index("readme() {") : script.index("\n}\n") + 3]

    def block(name: str) -> str:
        return subprocess.run(["bash", "-c", f"{function}\nreadme {name}"], cwd=ROOT, capture_output=True, text=True).stdout

    assert block("test-command").splitlines()[-1] == "uv run --group vllm pytest -n auto --dist loadfile"
    assert block("ablate-command").splitlines()[-1] == "uv run lldecode ablate"
    assert block("nonesuch") == ""
