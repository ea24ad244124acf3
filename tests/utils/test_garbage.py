"""What the collector of garbage looks through while a run trains."""

import subprocess
import sys

SCRIPT = """
import gc, weakref
from lightrft.utils.garbage import kept_from_collector

class Node: pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

def is_alive(ref):
    gc.collect()
    return ref() is not None

earlier = [[] for _ in range(50_000)]
dropped = cycle()
try:
    with kept_from_collector():
        assert dropped() is None
        assert len(gc.get_objects()) < 1000 and gc.get_freeze_count() > 50_000
        assert not is_alive(cycle())
        node = Node()
        with_node = weakref.ref(node)
        node.itself, inside = node, [node]
        raise KeyError
except KeyError:
    pass
assert gc.get_freeze_count() == 0 and len(gc.get_objects()) > 50_000
del node, inside
assert not is_alive(with_node)
"""


def test_what_is_alive_when_it_starts_is_out_of_sight_until_it_ends():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
