"""WandbWriter: a run's numbers at Weights & Biases."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightrft.config.arguments import ReportConfig

RUN_ID = "lightrft_run_id"
"""File in the folder `wandb` that names the run, so that a resumed one goes on in it."""


class WandbWriter:
    """Sends configuration, metrics and summary; samples stay in the run folder, and prompts and responses at home.

    Its files are in the folder `wandb` of the run folder, also of a run that is offline.

    Raises:
        ValueError: Nobody is logged in and the run is not offline, or the run cannot be opened there.
    """

    def __init__(self, options: ReportConfig, save_path: str | Path, resumed: bool) -> None:
        import wandb

        # Asking for a key here would stop a job that nobody watches.
        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "use_wandb needs a login at Weights & Biases: no key is configured. "
                "Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline."
            )
        folder = Path(save_path) / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / RUN_ID
        try:
            self._run = wandb.init(
                project=options.wandb_project,
                name=options.wandb_run_name,
                group=options.wandb_group,
                entity=options.wandb_org,
                dir=save_path,
                id=known.read_text() if resumed and known.exists() else None,
                resume="allow",
                # Its capture of the console would garble the live panel.
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise ValueError(
                f"use_wandb could not open a run at Weights & Biases: {error}. "
                "Correct the --wandb_ flags or the login, or set WANDB_MODE=offline."
            ) from error
        known.write_text(self._run.id)
        self._has_summary = False

    def write_config(self, yaml_text: str) -> None:
        # A resumed run may have changed flags.
        self._run.config.update(yaml.safe_load(yaml_text), allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def log_eval_samples(self, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._has_summary = True

    def close(self) -> None:
        """Waits until all is sent; a run that has no summary is marked as failed there."""
        self._run.finish(exit_code=0 if self._has_summary else 1)
