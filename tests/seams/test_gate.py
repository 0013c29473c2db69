"""The gate: a seam asks the step of its own thread, and without one calls the original and nothing else."""

import inspect
import threading
import types

import pytest

from keras_mirror.engine.build import BuildStep
from keras_mirror.engine.step import Step
from keras_mirror.seams import gate


class Loud:
    """A step that answers one hook."""

    def hook(self, original, *args, **kwargs):
        return ("step", original(*args, **kwargs))


@pytest.fixture
def module():
    made = types.ModuleType("upstream")
    exec("def double(value, *, plus=0):\n    'Doubles.'\n    return 2 * value + plus\n", vars(made))
    gate.gated(made, "double", "hook")
    return made


def test_without_a_step_the_original_is_called(module):
    assert module.double(2, plus=1) == 5


def test_inside_a_step_its_hook_decides(module):
    with gate.entered(Loud()):
        assert module.double(2, plus=1) == ("step", 5)
    assert module.double(2) == 4


def test_a_closed_gate_inside_a_step_calls_the_original(module):
    with gate.entered(Loud()):
        with gate.entered(None):
            assert module.double(2) == 4
        assert module.double(2) == ("step", 4)


def test_an_exception_leaves_no_step_entered(module):
    with pytest.raises(ZeroDivisionError), gate.entered(Loud()):
        1 / 0  # noqa: B018
    assert gate.current() is None
    assert module.double(2) == 4


def test_another_thread_sees_no_step(module):
    seen = []
    with gate.entered(Loud()):
        thread = threading.Thread(target=lambda: seen.append((gate.current(), module.double(2))))
        thread.start()
        thread.join()
    assert seen == [(None, 4)]


def test_a_seam_looks_like_the_original_and_is_put_in_once(module):
    original = module.double._keras_mirror_original
    gate.gated(module, "double", "hook")
    assert module.double._keras_mirror_original is original
    assert (module.double.__name__, module.double.__doc__) == ("double", "Doubles.")
    assert inspect.signature(module.double) == inspect.signature(original)


def test_a_name_that_upstream_lost_is_said_with_what_to_do(module):
    with pytest.raises(RuntimeError, match=r"upstream\.gone is gone(.|\n)*supported stacks"):
        gate.gated(module, "gone", "hook")


@pytest.mark.parametrize("step", [Step, BuildStep])
def test_a_step_answers_every_hook_with_the_agreed_parameters(step):
    hooks = {name: hook for name, hook in vars(gate.Hooks).items() if inspect.isfunction(hook) and not name.startswith("_")}
    assert len(hooks) > 10
    for name, hook in hooks.items():
        if step is BuildStep and name not in vars(step):
            assert callable(getattr(BuildStep(), name))
            continue
        needed = [p for p in inspect.signature(getattr(step, name)).parameters.values() if p.default is p.empty]
        agreed = inspect.signature(hook).parameters
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in agreed.values())
        assert takes_all or len([p for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]) <= len(agreed), name
