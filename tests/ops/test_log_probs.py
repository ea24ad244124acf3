import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft.ops.log_probs import token_log_probs

N, H, V = 7, 5, 11


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, H), (V, H), (V,)))
    target_ids = torch.randint(V, (N,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), target_ids


def dense_reference(hidden, weight, bias, target_ids, temperature):
    """Everything at once, in fp64; the inputs are copied, so that their gradients are apart."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    log_probs = torch.log_softmax((leaves[0] @ leaves[1].T + leaves[2]) / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return leaves, log_probs[torch.arange(len(target_ids)), target_ids], entropy


def assert_close(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


# log_softmax([2, 1, 0])[0] = -log(1 + e^-1 + e^-2) = -0.4076; at T = 0.5: -log(1 + e^-2 + e^-4) = -0.1429
@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.1429), (1.0, -0.4076)])
def test_temperature_divides_the_logits(temperature, expected):
    """NUM-01."""
    weight = torch.tensor([[2.0], [1.0], [0.0]])
    log_probs, _ = token_log_probs(torch.ones(1, 1), weight, torch.tensor([0]), temperature, chunk_size=4)
    assert log_probs.item() == pytest.approx(expected, abs=1e-4)


def test_entropy_is_in_nats():
    _, entropy = token_log_probs(torch.ones(1, 1), torch.zeros(4, 1), torch.tensor([0]), 1.0, chunk_size=4)
    assert entropy.item() == pytest.approx(1.386294)  # ln 4


@pytest.mark.parametrize("chunk_size", [1, 3, N, N + 10])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_values_and_gradients_equal_the_dense_reference(chunk_size, temperature):
    hidden, weight, bias, target_ids = make_inputs()
    leaves, expected_log_probs, expected_entropy = dense_reference(hidden, weight, bias, target_ids, temperature)
    log_probs, entropy = token_log_probs(hidden, weight, target_ids, temperature, chunk_size, bias, True)
    assert_close(log_probs, expected_log_probs)
    assert_close(entropy, expected_entropy)

    token_weights = torch.linspace(-1.0, 1.0, N)
    (token_weights * log_probs + 0.3 * entropy).sum().backward()
    (token_weights.double() * expected_log_probs + 0.3 * expected_entropy).sum().backward()
    for tensor, leaf in zip((hidden, weight, bias), leaves, strict=True):
        assert_close(tensor.grad, leaf.grad)


def test_entropy_has_a_gradient_only_on_request():
    hidden, weight, _, target_ids = make_inputs()
    plain, with_grad = (token_log_probs(hidden, weight, target_ids, 1.0, 3, None, asked) for asked in (False, True))
    assert not plain[1].requires_grad and with_grad[1].requires_grad
    assert torch.equal(plain[0], with_grad[0]) and torch.equal(plain[1], with_grad[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy_grad", [False, True])
def test_values_are_the_same_to_the_bit_without_gradients(dtype, with_entropy_grad):
    """NUM-01."""
    hidden, weight, bias, target_ids = make_inputs(dtype)
    arguments = (hidden, weight, target_ids, 0.7, 3, bias, with_entropy_grad)
    trained = token_log_probs(*arguments)
    with torch.no_grad():
        scored = token_log_probs(*arguments)
    for one, other in zip(trained, scored, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_bf16_logits_are_rounded_once_and_normalised_in_fp32():
    hidden, weight, _, target_ids = make_inputs(torch.bfloat16)
    log_probs, _ = token_log_probs(hidden, weight, target_ids, 1.0, 3)
    logits = (hidden @ weight.T).double()
    assert_close(log_probs, torch.log_softmax(logits, dim=-1)[torch.arange(N), target_ids])


def test_no_tokens_reach_hidden_and_weight_with_zero_gradients():
    """NUM-07."""
    _, weight, bias, _ = make_inputs()
    hidden = torch.zeros(0, H, requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0, 3, bias)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, H)
    assert weight.grad is not None and weight.grad.count_nonzero() == 0
    assert bias.grad is not None and bias.grad.count_nonzero() == 0


@pytest.mark.parametrize("chunk_size", [8, 64, 4096])
def test_a_bf16_gradient_of_the_weight_is_rounded_once_whatever_a_chunk_has(chunk_size):
    """0.24 % of its norm is what bf16 logits and one rounding leave; a sum over 512 chunks rounds 512 times."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4096, 32).bfloat16(), (torch.randn(640, 32) / 4).bfloat16().requires_grad_()
    target_ids, factors = torch.randint(640, (4096,)), torch.randn(4096)
    log_probs, _ = token_log_probs(hidden, weight, target_ids, 1.0, chunk_size)
    (log_probs * factors).sum().backward()
    exact = weight.detach().double().requires_grad_()
    expected = torch.log_softmax(hidden.double() @ exact.T, dim=-1)[torch.arange(4096), target_ids]
    (expected * factors).sum().backward()
    assert weight.grad is not None and exact.grad is not None
    assert (weight.grad - exact.grad).norm() < 0.004 * exact.grad.norm()


@pytest.mark.parametrize(("num_tokens", "vocabulary"), [(200, 1000), (1000, 130), (65, 64), (3, 7)])
def test_parts_of_the_vocabulary_give_the_gradients_of_the_whole(num_tokens, vocabulary):
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_tokens, 4), torch.randn(vocabulary, 4)
    target_ids, factors = torch.randint(vocabulary, (num_tokens,)), torch.randn(2, num_tokens)
    gradients = []
    for chunk_size in (2, num_tokens):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        output = token_log_probs(*leaves, target_ids, 0.7, chunk_size, with_entropy_grad=True)
        (torch.stack(output) * factors).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


class LiveMemory(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made, and of all that are alive, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in inputs:
                self._record(leaf)
        return result

    def _record(self, tensor: torch.Tensor) -> None:
        self.largest = max(self.largest, tensor.nbytes)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += tensor.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, tensor.nbytes)

    def _release(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy_grad", [False, True])
def test_eight_bytes_a_logit_of_a_chunk_are_alive_in_both_passes(with_entropy_grad, dtype):
    """MEM-05: sixteen chunks need as much as one; hidden states and weights are small here beside a chunk's logits."""
    chunk_size, vocabulary = 4, 10_000
    weight = torch.randn(vocabulary, 1, dtype=dtype, requires_grad=True)

    def measure(num_tokens: int) -> LiveMemory:
        hidden = torch.randn(num_tokens, 1, dtype=dtype, requires_grad=True)
        target_ids = torch.zeros(num_tokens, dtype=torch.int64)
        with LiveMemory() as memory:
            log_probs, entropy = token_log_probs(hidden, weight, target_ids, 1.0, chunk_size, None, with_entropy_grad)
            (log_probs + entropy).sum().backward()
        return memory

    one, many = measure(chunk_size), measure(16 * chunk_size)
    assert many.largest <= one.largest == 4 * chunk_size * vocabulary
    # Beside them: a few numbers a token, and the weight's gradient, of which each part of the vocabulary has its rows.
    assert many.peak <= 8 * chunk_size * vocabulary + 1.3 * vocabulary * weight.itemsize


@pytest.mark.parametrize("chunk_size", [3, 64])
@pytest.mark.parametrize("with_entropy_grad", [False, True])
def test_tokens_that_are_nearly_certain_keep_the_digits_of_their_gradients(chunk_size, with_entropy_grad):
    """Logits of 400, of which fp32 has 5 decimals, and 0.1 % for all other tokens: 1 - p is what remains."""
    torch.manual_seed(0)
    hidden = torch.cat([torch.ones(64, 1), torch.rand(64, 2)], 1)
    weight = torch.cat([torch.full((200, 1), 400.0), torch.rand(200, 2)], 1)
    weight[7, 0] += 12
    target_ids = torch.full((64,), 7)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        if dtype == torch.float32:
            output = token_log_probs(*leaves, target_ids, 1.0, chunk_size, with_entropy_grad=with_entropy_grad)
        else:
            every = torch.log_softmax(leaves[0] @ leaves[1].T, dim=-1)
            output = every[:, 7], -(every.exp() * every).sum(-1)
        (output[0].sum() + (output[1].sum() if with_entropy_grad else 0)).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for got, want in zip(*gradients, strict=True):
        assert (got - want).norm() < 0.02 * want.norm()


def leak(num_tokens: int, vocabulary: int, width: int, device: str = "cpu") -> float:
    """How far a token's gradients of logits, in bf16, are from a sum of 0, in shares of 1 - p: the worst of tokens.

    They are summed up as the gradient of a number that is 0 in all hidden states and 1 in all rows of the weight.
    """
    numbers = torch.Generator(device).manual_seed(0)
    weight = torch.nn.functional.normalize(torch.randn(vocabulary, width, generator=numbers, device=device))
    target_ids = torch.randint(vocabulary, (num_tokens,), generator=numbers, device=device)
    hidden = 16 * weight[target_ids]
    weight[:, -1], hidden[:, -1] = 1, 0
    hidden = hidden.bfloat16().requires_grad_()
    log_probs, _ = token_log_probs(hidden, weight.bfloat16(), target_ids, 1.0, chunk_size=192)
    log_probs.sum().backward()
    assert hidden.grad is not None
    return (hidden.grad[:, -1].float().abs() / -log_probs.detach().expm1()).max().item()


@pytest.mark.parametrize("num_tokens", [100, 200, 1000])
def test_a_token_s_gradients_of_logits_add_up_to_nothing(num_tokens):
    """Both passes make the same logits: rounded otherwise, one of 16 is 1/8 off, and 1 - p of a likely token lost."""
    assert leak(num_tokens, vocabulary=5000, width=64) < 0.02


def test_outputs_own_their_memory():
    """FSDP2 warns of views: what is done to them in place would drop the hook that gathers weights."""
    hidden, weight, _, target_ids = make_inputs()
    log_probs, entropy = token_log_probs(hidden, weight, target_ids, 1.0, 3)
    assert log_probs._base is None and entropy._base is None
    assert log_probs.untyped_storage().nbytes() == 4 * N
    (log_probs.mul_(2) + entropy.mul_(2)).sum().backward()


def test_a_target_outside_of_the_vocabulary_is_no_number():
    """A wrong label must not train quietly."""
    hidden, weight = torch.randn(N, 4), torch.randn(130, 4)
    for wrong in (-100, -1, 130, 191, 1000):
        for chunk_size in (1, N):
            target_ids = torch.tensor([0] * (N - 1) + [wrong])
            log_probs, _ = token_log_probs(hidden, weight, target_ids, 1.0, chunk_size)
            assert log_probs[:-1].isfinite().all() and log_probs[-1].isnan()


def test_a_suppressed_target_teaches_nothing_of_its_own_row():
    hidden, weight, _, target_ids = make_inputs()
    log_probs, _ = token_log_probs(hidden, weight, target_ids, 1.0, 3, suppressed_ids=target_ids[:1])
    log_probs[torch.isfinite(log_probs)].sum().backward()
    log_probs, _ = token_log_probs(hidden, weight, target_ids, 1.0, 3, suppressed_ids=target_ids[:1])
    log_probs.sum().backward()
    assert weight.grad is not None and weight.grad[target_ids[0]].count_nonzero() == 0


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_suppressed_ids_have_probability_0_and_leave_a_distribution_over_the_others(chunk_size):
    """As if the vocabulary were without them: log-probs, entropies and gradients of both."""
    torch.manual_seed(0)
    kept, suppressed = torch.tensor([0, 2, 3, 5]), torch.tensor([1, 4])
    hidden = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    places = torch.randint(4, (7,))
    results = []
    for rows, ids, targets in ((weight, suppressed, kept[places]), (weight[kept], None, places)):
        output = token_log_probs(hidden, rows, targets, 0.7, chunk_size, with_entropy_grad=True, suppressed_ids=ids)
        (output[0].sum() + 2 * output[1].sum()).backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append((*output, hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    log_probs, _ = token_log_probs(hidden, weight, suppressed[:1].repeat(7), 0.7, chunk_size, suppressed_ids=suppressed)
    assert torch.isneginf(log_probs).all()
