"""Another distribution named `kernels` is found, and said so."""

import importlib.util
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from command import ROOT, run

import jaxinfer
from jaxinfer import _kernels_package, cli
from jaxinfer._kernels_package import check_kernels_package


class TestKernelsPackage:
    def test_ours_is_accepted(self):
        check_kernels_package()

    @pytest.fixture
    def site(self, tmp_path, monkeypatch):
        """A folder from which `kernels` comes, as far as anyone can tell."""
        package = tmp_path / "site" / "kernels"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        spec = SimpleNamespace(origin=str(package / "__init__.py"))
        fake = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: spec))
        monkeypatch.setattr(_kernels_package, "importlib", fake)
        return package

    def test_a_foreign_package_is_refused(self, site):
        with pytest.raises(ImportError, match="pip uninstall kernels") as caught:
            check_kernels_package()
        assert str(site) in str(caught.value)

    def test_files_of_both_are_refused(self, site):
        (site / "dispatch.py").touch()
        check_kernels_package()
        (site.parent / "kernels-0.9.0.dist-info").mkdir()
        with pytest.raises(ImportError, match="another distribution named `kernels`"):
            check_kernels_package()

    def test_the_command_says_it_in_one_sentence(self, site, capsys):
        assert cli.main(["serve"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("jaxinfer: another distribution")
        assert error.count("\n") == 1

    def test_the_library_checks_before_it_imports(self, site, monkeypatch):
        monkeypatch.delitem(vars(jaxinfer), "LLM", raising=False)
        with pytest.raises(ImportError, match="another distribution"):
            jaxinfer.LLM  # noqa: B018
        assert jaxinfer.SamplingParams

    def test_a_missing_one(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match="missing"):
            check_kernels_package()


def test_the_package_is_found_where_it_is_copied(tmp_path):
    """Both packages side by side, as a wheel installs them."""
    for name in ("jaxinfer", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from jaxinfer._kernels_package import check_kernels_package as c; c()"
    assert run("-c", code, PYTHONPATH=str(tmp_path)).returncode == 0
    (tmp_path / "kernels-1.0.dist-info").mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "jaxinfer", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "pip uninstall kernels" in result.stderr
