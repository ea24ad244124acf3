"""Functions of the algorithm by the flags that name them: built in, or the user's own, whose results are checked."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from lightrft.config.functions import is_function_spec, load_function, module_errors
from lightrft.ops.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from lightrft.ops.losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs
from lightrft.ops.segments import zero_masked

Estimator: TypeAlias = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
PolicyLossFunction: TypeAlias = Callable[[PolicyLossInputs], PolicyLoss]


def load_estimator(spec: str) -> Estimator:
    """The estimator that `--advantage_estimator` names; raises ValueError where there is none."""
    if not is_function_spec(spec):
        return ADVANTAGE_ESTIMATORS[spec]
    function = _load("advantage_estimator", spec)

    def estimate(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        if not inputs.lengths:  # A rank without samples has nothing that a mean or a maximum could be taken of.
            return inputs.scores, inputs.scores
        return checked_advantages(spec, function(inputs), inputs)

    return estimate


def load_policy_loss(spec: str) -> PolicyLossFunction:
    """The loss that `--policy_loss` names; raises ValueError where there is none."""
    if not is_function_spec(spec):
        return POLICY_LOSSES[spec]
    function = _load("policy_loss", spec)
    return lambda inputs: checked_policy_loss(spec, function(inputs), inputs)


def checked_advantages(spec: str, result: Any, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """What a user's estimator returned: two tensors of a finite number a kept token, here 0 at masked ones.

    Raises:
        ValueError: they are no such tensors.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"advantage_estimator must return two tensors, advantages and returns: {spec} returned "
            f"{type(result).__name__}."
        )
    for name, values in zip(("advantages", "returns"), result, strict=True):
        _check_tokens(f"advantage_estimator's {name}", spec, values, inputs.action_mask.shape)
        num_wrong = int((~values.isfinite() & inputs.action_mask).sum())
        _check_finite(f"advantage_estimator's {name}", spec, num_wrong)
    advantages, returns = (zero_masked(values.detach().float(), inputs.action_mask) for values in result)
    return advantages, returns


def checked_policy_loss(spec: str, result: Any, inputs: PolicyLossInputs) -> PolicyLoss:
    """What a user's loss returned, with a finite loss and a gradient for each token.

    Raises:
        ValueError: it has not.
    """
    if not isinstance(result, PolicyLoss):
        raise ValueError(f"policy_loss must return a PolicyLoss: {spec} returned {type(result).__name__}.")
    shape = inputs.log_probs.shape
    _check_tokens("policy_loss's losses", spec, result.losses, shape)
    clips = {name: values for name, values in vars(result).items() if name.startswith("clipped_")}
    for name, clipped in clips.items():
        if clipped is not None:
            _check_tokens(f"policy_loss's {name}", spec, clipped, shape)
    # What a policy makes that is not finite itself is a step to skip, and no mistake of the function.
    if bool(inputs.log_probs.isfinite().all()):
        _check_finite("policy_loss's losses", spec, int((~result.losses.isfinite()).sum()))
    if inputs.log_probs.requires_grad and not result.losses.requires_grad:
        raise ValueError(
            f"policy_loss must be a function of the log-probs that learn: {spec} returned losses without a gradient. "
            "Compute them from inputs.log_probs, and do not detach those."
        )
    return result


def _load(flag: str, spec: str) -> Callable[[Any], Any]:
    with module_errors(flag, spec):
        function = load_function(flag, spec)
    signature = inspect.signature(function)
    try:
        signature.bind(None)
    except TypeError as error:
        raise ValueError(
            f"{flag} must name a function of one argument, the record of its inputs: {spec} takes {signature}. "
            "Change its parameters."
        ) from error
    return function


def _check_tokens(what: str, spec: str, values: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor) or values.shape != shape:
        found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{what} must be a tensor of shape {tuple(shape)}, one a token: {spec} returned {found}.")


def _check_finite(what: str, spec: str, num_wrong: int) -> None:
    if num_wrong:
        raise ValueError(f"{what} must be finite: {spec} returned {num_wrong} that are not.")
