"""Callbacks: what a user's own code is told while a run goes on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.trainer.ppo_trainer import PPOTrainer


class Callback:
    """Base of callbacks, whose methods do nothing.

    Every rank has the same ones and calls them at the same places; `trainer.strategy.is_rank_0` tells one rank from
    the others. What a method raises on one rank ends all, with its traceback. A method must not call what every rank
    has to call together: the others would wait for a rank that has failed. `trainer.should_stop = True`, on any rank,
    ends the run after the running step, as if it were the last.
    """

    def on_train_begin(self, trainer: "PPOTrainer") -> None:
        """Models and engine are ready, and `trainer.step` steps are done: 0 but in a run that goes on."""

    def on_evaluate(self, trainer: "PPOTrainer", step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done, whose metrics are `eval/*`; step 0 is before the first one."""

    def on_step_end(self, trainer: "PPOTrainer", step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, and its metrics are written; they are the same on every rank, but for times and memory."""

    def on_checkpoint(self, trainer: "PPOTrainer", step: int) -> None:
        """A checkpoint was saved."""

    def on_train_end(self, trainer: "PPOTrainer", summary: Mapping[str, float]) -> None:
        """The run is over, its model and its summary are written; a signal may have ended it."""


def check_callbacks(callbacks: object) -> None:
    """Raises ValueError where they are no list of Callbacks: a class, or a function, say."""
    if isinstance(callbacks, list | tuple):
        others = [type(callback).__name__ for callback in callbacks if not isinstance(callback, Callback)]
        if not others:
            return
        got = f"a {type(callbacks).__name__} with {', '.join(others)}"
    else:
        got = type(callbacks).__name__
    raise ValueError(
        f"callbacks must be a list of objects of subclasses of Callback: got {got}. Write callbacks=[MyCallback()]."
    )
