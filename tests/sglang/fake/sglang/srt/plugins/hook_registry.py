import functools
import pkgutil
from enum import Enum
from typing import ClassVar


class HookType(Enum):
    AFTER = "after"


class HookRegistry:
    hooks: ClassVar[list] = []

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks:
            path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, _after(getattr(owner, name), hook))


def _after(original, hook):
    @functools.wraps(original)
    def wrapped(*arguments):
        result = original(*arguments)
        changed = hook(result, *arguments)
        return result if changed is None else changed

    return wrapped
