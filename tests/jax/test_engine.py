"""The rollout engine: exact log-probs, independence of settings, pages, versions, compilation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.config import ModelConfig, RolloutConfig
from common.model.geometry import Geometry
from common.rollout import paged_engine
from common.rollout.page_pool import PagePool, pages_for
from common.schedule.schedule import DENSE, Schedule
from common.types import Prompt
from sparrow_jax import cache as kv_cache
from sparrow_jax import decode
from sparrow_jax.engine import Engine
from sparrow_jax.toy.random_init import random_decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = ModelConfig(
    vocab_size=48, num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=8, rope_theta=1e4, qk_gain=2.0,
)  # fmt: skip
G = Geometry.from_config(MODEL)
PAGE, MAX_PROMPT, MAX_RESPONSE = 4, 24, 26
WIDTH = pages_for(MAX_PROMPT + MAX_RESPONSE, PAGE)  # 13 pages
STOP = [7, 11]
SPARSE = Schedule(page_size=PAGE, bin_tokens=16, budgets=(0, 1, 2))
OTHER = Schedule(page_size=PAGE, bin_tokens=8, budgets=(3, 0, 1))
ALL_PAGES = Schedule(page_size=PAGE, bin_tokens=16, budgets=(1, 5, DENSE))
LENGTHS = [1, 3, 4, 5, 8, 15, 16, 17, 24]


@functools.cache
def weights(seed=0):
    """Parameters with distributions that are peaked enough to tell tokens apart."""
    params = random_decoder(dataclasses.replace(MODEL, init_seed=seed))[1]
    return jax.tree.map(lambda x: x * 1.5, params)


GRAPH = random_decoder(MODEL)[0]


@functools.cache
def make(num_slots=8, decode_chunk=8, prefill_chunk=16, **kwargs):
    settings = {
        "page_size": PAGE, "max_prompt_tokens": MAX_PROMPT, "max_response_tokens": MAX_RESPONSE,
        "num_slots": num_slots, "decode_chunk": decode_chunk, "prefill_chunk": prefill_chunk,
        "num_dense_layers": 1,
    }  # fmt: skip
    engine = Engine(GRAPH, G, RolloutConfig(**settings | kwargs), STOP, jnp.float32)
    engine.load_weights(weights(), 0)
    return engine


def prompts(lengths=LENGTHS, first_id=0):
    return [
        Prompt(
            prompt_id=first_id + i, task="x", answer={},
            tokens=np.random.default_rng([n, first_id + i]).integers(0, 48, n).astype(np.int32),
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def generate(engine, prompt_list=None, num_samples=3, schedule=None, seed=1, **kwargs):
    prompt_list = prompts() if prompt_list is None else prompt_list
    return engine.generate(
        prompt_list, num_samples=num_samples, schedule=schedule, seed=seed, **kwargs
    )


@functools.cache
def base(schedule):
    """What the engine with the usual settings samples; most tests compare with it."""
    return generate(make(), schedule=schedule)


@functools.partial(jax.jit, static_argnames="num_dense")
def _score(params, tokens_BT, budget_T, sparse_BT, temperature, num_dense=1):
    model = nnx.merge(GRAPH, params)
    hidden = model.hidden(
        tokens_BT, dtype=jnp.float32, budget_T=budget_T, sparse_BT=sparse_BT, page=PAGE,
        num_dense=num_dense,
    )  # fmt: skip
    logits = hidden @ model.head(jnp.float32).T / temperature
    logp = jax.nn.log_softmax(logits)[:, :-1]
    return jnp.take_along_axis(logp, tokens_BT[:, 1:, None], 2)[..., 0]


def scored(rollout, schedule=None, temperature=1.0, params=None):
    """log p(token t | tokens before), by teacher forcing, at any t >= 1."""
    width = MAX_PROMPT + MAX_RESPONSE
    pad = (0, 0), (0, width - rollout.tokens_BT.shape[1])
    tokens, queries = np.pad(rollout.tokens_BT, pad), np.pad(rollout.sparse_BT[:, 1:], pad)
    queries = np.pad(queries, ((0, 0), (0, 1)))  # query t - 1 predicts token t
    budgets = None if schedule is None else schedule.budgets_at(np.arange(width))
    params = weights() if params is None else params
    logp = _score(params, tokens, budgets, queries, np.float32(temperature))
    return np.pad(logp, ((0, 0), (1, 0)))[:, : rollout.tokens_BT.shape[1]]


def same_tokens(a, b, rows=slice(None)):
    np.testing.assert_array_equal(a.total_len_B, b.total_len_B[rows])
    T = a.tokens_BT.shape[1]
    np.testing.assert_array_equal(a.tokens_BT, b.tokens_BT[rows][:, :T])
    np.testing.assert_allclose(a.logp_sparse_BT, b.logp_sparse_BT[rows][:, :T], atol=1e-4)


def agree(rollout, want):
    mask = rollout.response_mask_BT
    np.testing.assert_allclose(rollout.logp_sparse_BT[mask], want[mask], atol=1e-4)
    assert (rollout.logp_sparse_BT[~mask] == 0).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.2])
def test_dense_log_probs_are_those_of_the_scorer(temperature):
    rollout = generate(make(), seed=3, temperature=temperature)
    agree(rollout, scored(rollout, temperature=temperature))
    wrong = scored(rollout, temperature=temperature * 1.1)
    assert np.abs(wrong - rollout.logp_sparse_BT)[rollout.response_mask_BT].max() > 0.05


@pytest.mark.parametrize("schedule", [SPARSE, OTHER], ids=["rising", "falling"])
def test_sparse_log_probs_are_those_of_the_replay(schedule):
    rollout = base(schedule)
    agree(rollout, scored(rollout, schedule))
    mask = rollout.response_mask_BT
    gap = np.abs(scored(rollout) - rollout.logp_sparse_BT)
    assert gap[mask].max() > 0.05, "sparse attention must differ from dense"
    first = np.arange(len(gap)), rollout.prompt_len_B  # comes from the dense prefill
    np.testing.assert_allclose(gap[first], 0, atol=1e-4)


SETTINGS = {
    "one slot, odd chunks": {"num_slots": 1, "decode_chunk": 3, "prefill_chunk": 5},
    "smallest pool": {"num_slots": 3, "cache_pages": 1 + 2 * WIDTH, "prefill_chunk": 7},
    "all at once": {"num_slots": 64, "decode_chunk": 30, "prefill_chunk": 24},
}


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_the_engine_change_no_token(settings, schedule):
    same_tokens(generate(make(**settings), schedule=schedule), base(schedule))


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
def test_neighbours_change_no_token(schedule):
    chosen = [7, 2, 5]
    alone = generate(make(), [prompts()[i] for i in chosen], 2, schedule)
    rows = [3 * i + s for i in chosen for s in range(2)]
    same_tokens(alone, base(schedule), rows)


def test_same_seed_same_tokens_other_seed_or_sample_other_tokens():
    a, b, c = base(None), generate(make()), generate(make(), seed=2)
    np.testing.assert_array_equal(a.tokens_BT, b.tokens_BT)
    differ = [not np.array_equal(a.response(r), c.response(r)) for r in range(27)]
    assert np.mean(differ) > 0.9
    pairs = [not np.array_equal(a.response(3 * i), a.response(3 * i + 1)) for i in range(9)]
    assert np.mean(pairs) > 0.7
    # two prompts with the same tokens but different ids have noise of their own
    twins = [Prompt(prompt_id=i, tokens=np.arange(9), task="x", answer={}) for i in (1, 2)]
    r = generate(make(), twins, 1)
    assert not np.array_equal(r.response(0), r.response(1))


def test_budget_that_covers_all_pages_is_dense():
    assert not ALL_PAGES.is_dense
    same_tokens(generate(make(), schedule=ALL_PAGES), base(None))
    dense = Schedule(page_size=PAGE, bin_tokens=16, budgets=(DENSE,))
    np.testing.assert_array_equal(generate(make(), schedule=dense).tokens_BT, base(None).tokens_BT)


def test_layout_of_the_rollout():
    r = base(SPARSE)
    np.testing.assert_array_equal(r.group_B, np.repeat(np.arange(9), 3))
    np.testing.assert_array_equal(r.sample_B, np.tile(np.arange(3), 9))
    np.testing.assert_array_equal(r.prompt_len_B, np.repeat(LENGTHS, 3))
    position = np.arange(r.tokens_BT.shape[1])
    for b, prompt in enumerate(r.prompts):
        n, end = r.prompt_len_B[b], r.total_len_B[b]
        np.testing.assert_array_equal(r.tokens_BT[b, :n], prompt.tokens)
        np.testing.assert_array_equal(r.response_mask_BT[b], (position >= n) & (position < end))
        assert (r.tokens_BT[b, end:] == 0).all()
    np.testing.assert_array_equal(r.version_BT, np.where(r.response_mask_BT, 0, -1))


def test_rows_end_at_a_stop_id_or_at_the_limit():
    r = base(None)
    responses = [r.response(b) for b in range(27)]
    stopped = np.array([t[-1] in STOP for t in responses])
    np.testing.assert_array_equal(r.finished_B, stopped)
    assert stopped.any() and not stopped.all()
    assert all(not np.isin(t[:-1], STOP).any() for t in responses)
    lengths = np.array([len(t) for t in responses])
    assert (lengths[~stopped] == MAX_RESPONSE).all() and lengths.min() >= 1
    assert r.stats["decode_tokens"] == lengths.sum()


def test_with_ignore_eos_rows_go_on_to_the_limit():
    r, stopped = generate(make(ignore_eos=True)), base(None)
    assert (r.total_len_B - r.prompt_len_B == MAX_RESPONSE).all() and not r.finished_B.any()
    for b in range(27):  # up to where the others stop, the tokens are the same
        want = stopped.response(b)
        np.testing.assert_array_equal(r.response(b)[: len(want)], want)
    agree(r, scored(r))


def test_response_limit_of_one_token():
    engine = make(max_response_tokens=1, max_prompt_tokens=16, num_slots=2)
    chosen = prompts([4, 5, 16])
    r = generate(engine, chosen, 2)
    np.testing.assert_array_equal(r.total_len_B, r.prompt_len_B + 1)
    agree(r, scored(r))


def test_greedy_takes_the_argmax_and_top_p_renormalises():
    greedy = generate(make(), num_samples=1, temperature=0)
    again = generate(make(), num_samples=1, temperature=0, seed=99)
    np.testing.assert_array_equal(greedy.tokens_BT, again.tokens_BT)
    agree(greedy, scored(greedy))
    nucleus = generate(make(), num_samples=1, top_p=1e-6)  # keeps the most likely token only
    np.testing.assert_array_equal(nucleus.tokens_BT, greedy.tokens_BT)
    assert (nucleus.logp_sparse_BT == 0).all()  # log 1


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
def test_new_weights_leave_nothing_of_the_old_ones(schedule):
    engine = make()
    engine.load_weights(weights(1), 5)
    try:
        new = generate(engine, schedule=schedule)
        agree(new, scored(new, schedule, params=weights(1)))
        assert set(new.version_BT[new.response_mask_BT]) == {5}
        assert not np.array_equal(new.response(20), base(schedule).response(20))
    finally:
        engine.load_weights(weights(), 0)
    same_tokens(generate(engine, schedule=schedule), base(schedule))


def test_stale_pages_of_an_earlier_call_are_never_read():
    """NaN in every free page: nothing that a call leaves in the cache reaches the next call."""
    engine = make()
    base(SPARSE)
    programs = engine.open()
    programs.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), programs.cache)
    programs.close()
    try:
        same_tokens(generate(engine, schedule=SPARSE), base(SPARSE))
    finally:
        engine._cache = None


def test_all_pages_come_back(monkeypatch):
    pools = []

    class Recorded(PagePool):
        def __post_init__(self):
            super().__post_init__()
            self.least = self.num_free
            pools.append(self)

        def take(self, count):
            pages = super().take(count)
            self.least = min(self.least, self.num_free)
            return pages

    monkeypatch.setattr(paged_engine, "PagePool", Recorded)
    generate(make(), schedule=SPARSE)
    generate(make(**SETTINGS["smallest pool"]), num_samples=5)
    for pool in pools:
        assert pool.num_free == pool.num_pages - 1 == len(set(pool.take(pool.num_free)))
    assert pools[1].least < WIDTH, "the small pool must have been nearly used up"


def test_page_pool_counts_owners():
    pool = PagePool(5)
    a, b = pool.take(2), pool.take(1)
    assert (a, b, pool.num_free) == ([1, 2], [3], 1)
    pool.share([1])
    pool.release([1, 2])
    assert pool.num_free == 2 and pool.take(2) == [2, 4]
    pool.release([1])
    assert pool.take(1) == [1]
    for misuse in (lambda: pool.take(1), lambda: [pool.release([3])] * 2 and pool.release([3])):
        with pytest.raises(AssertionError):
            misuse()


def test_prefill_work_does_not_depend_on_the_group_size():
    chosen = prompts([5, 17])
    one, many = (generate(make(), chosen, n) for n in (1, 9))
    assert one.stats["prefill_tokens"] == many.stats["prefill_tokens"] == 22
    assert many.tokens_BT.shape[0] == 18


def compiled():
    return tuple(f._cache_size() for f in (decode.prefill, decode.fork, decode.decode))


def test_no_compilation_as_lengths_budgets_and_temperatures_change():
    engine = make()
    for schedule in (None, SPARSE):
        generate(engine, schedule=schedule)
    before = compiled()
    for lengths, samples in (([1], 1), ([24, 9, 2], 5)):
        generate(engine, prompts(lengths, 50), samples, seed=8, temperature=0.7)
        for schedule in (SPARSE, OTHER):
            generate(engine, prompts(lengths, 70), samples, schedule)
    assert compiled() == before


def test_no_compilation_as_a_controller_changes_the_schedule():
    engine = make(page_size=1)  # 50 pages: widths of 16, 32, 48 and 50 are programs of their own

    def run(k, size):
        schedule = Schedule(page_size=1, bin_tokens=16, budgets=(1, k), sized_for=size)
        generate(engine, prompts([5]), 1, schedule)
        return compiled()

    first = run(1, 20)
    assert [run(k, 20) for k in (2, 13, 14, 20)] == [first] * 4
    assert run(1, 0) != first  # without sized_for, small budgets have a program of their own


@pytest.mark.parametrize("max_selected", [0, 16])
def test_the_pool_is_updated_in_place(max_selected):
    S, P, g = (
        4,
        60,
        dataclasses.replace(MODEL, num_layers=3),
    )  # a loop over layers, not one of each kind
    graph, params = random_decoder(g)
    shapes = jax.eval_shape(lambda: kv_cache.allocate(g, 20_000, PAGE, jnp.float32))
    pool = sum(x.size * x.dtype.itemsize for x in shapes)
    ints = jax.ShapeDtypeStruct((S,), jnp.int32)
    words = jax.ShapeDtypeStruct((S,), jnp.uint32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = decode.decode.lower(
        params, shapes, jax.ShapeDtypeStruct((S, 32), jnp.float32),
        jax.ShapeDtypeStruct((S,), bool), ints, ints, (words, words),
        jax.ShapeDtypeStruct((S, P), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32), scalar, scalar, graph=graph, dtype=jnp.float32,
        num_tokens=8, stop_ids=(7,), max_selected=max_selected, num_dense=1, greedy=False,
        nucleus=False,
    )  # fmt: skip
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * pool
    assert memory.alias_size_in_bytes >= pool, "the cache must be donated"


@pytest.mark.parametrize(("call", "message"), [
    (lambda: generate(make(), prompts([25])), "25 tokens, expected 1 to 24"),
    (lambda: generate(make(), prompts([3, 0])), "prompt 1 has 0 tokens, expected 1 to 24"),
    (lambda: generate(make(), []), "expected at least one"),
    (lambda: generate(make(), num_samples=0), "num_samples=0"),
    (lambda: generate(make(), schedule=Schedule(page_size=16, bin_tokens=8, budgets=(1,))),
     "pages of 16 tokens, engine has rollout.page_size=4"),
    (lambda: generate(make(), top_p=0.0), "top_p=0.0"),
    (lambda: generate(make(), top_p=1.5), "top_p=1.5"),
    (lambda: generate(make(), temperature=-0.5), "temperature=-0.5"),
    (lambda: make(cache_pages=2 * WIDTH), "cache_pages=26.*need 27 pages"),
])  # fmt: skip
def test_bad_input_gets_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    same_tokens(generate(make(), prompts()[:1]), base(None), [0, 1, 2])  # the engine still works
