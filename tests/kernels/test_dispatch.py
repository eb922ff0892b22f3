"""Dispatch takes the first implementation that does not refuse, and says why others did."""

import types

import pytest

from kernels import dispatch

TABLE = {"cpu": ("reference", "xla"), "gpu": ("xla",)}


def choose(refused, platform="cpu", requested=None):
    def supports(module):
        name = module.__name__.rsplit(".", 1)[-1]
        if name in refused:
            raise NotImplementedError(refused[name])

    return dispatch.choose(
        "kernels.paged_attention",
        TABLE,
        platform=platform,
        requested=requested,
        supports=supports,
    )


def test_takes_the_first_of_the_platform():
    choice = choose({})
    assert choice.name == "reference"
    assert isinstance(choice.module, types.ModuleType)
    assert choice.refusals == ()
    assert str(choice) == "reference"


def test_a_refusal_moves_on_and_is_told():
    choice = choose({"reference": "too slow"})
    assert choice.name == "xla"
    assert choice.refusals == (("reference", "too slow"),)
    assert str(choice) == "xla (reference refused: too slow)"


def test_a_requested_implementation_is_never_replaced():
    assert choose({}, requested="xla").name == "xla"
    with pytest.raises(NotImplementedError, match="xla: no window"):
        choose({"xla": "no window"}, requested="xla")


def test_all_refusals_are_told():
    with pytest.raises(NotImplementedError, match="reference: a; xla: b"):
        choose({"reference": "a", "xla": "b"})


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match=r"'metal'.*'cpu', 'gpu'"):
        choose({}, platform="metal")
    with pytest.raises(ValueError, match=r"'pallas'.*'reference', 'xla'"):
        choose({}, requested="pallas")


def test_other_errors_are_not_taken_for_refusals():
    def supports(module):
        raise AttributeError("a bug")

    with pytest.raises(AttributeError, match="a bug"):
        dispatch.choose(
            "kernels.paged_attention", TABLE, platform="cpu", requested=None, supports=supports
        )


@pytest.mark.parametrize(
    ("missing", "is_refusal"), [("absl", True), ("absl.flags", True), ("kernels.typo", False)]
)
def test_a_missing_package_refuses_and_a_missing_module_of_ours_is_an_error(
    missing, is_refusal, monkeypatch
):
    def import_module(name):
        if name.endswith(".reference"):
            raise ModuleNotFoundError("not there", name=missing)
        return types.ModuleType(name)

    monkeypatch.setattr(dispatch, "import_module", import_module)
    if is_refusal:
        assert choose({}).refusals == (("reference", f"{missing} is not installed"),)
    else:
        with pytest.raises(ModuleNotFoundError):
            choose({})
