"""The default controller: as many tokens per second as acceptance and costs promise.

    goodput(strategy) = E[tokens of a row's round] / seconds of a round

in the bucket at hand; plain decoding is one of the choices, so that speculation which does not
pay is left alone. E comes from acceptance rates by depth, counted with a window that forgets;
the seconds from a table measured at the start and, unless frozen, from the blocks' own times.

It tries what it does not know only as long as that has cost less than a small share of the
time, and only choices that could be better than the best known one. Nothing is drawn at random:
the same memory chooses the same way, on every host and after a resume.
"""

import dataclasses
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Sequence

from fastgrpo_jax import base
from fastgrpo_jax.rollout import costs, strategy

_ROWS_DIFFER = 0.15  # standard deviation of the acceptance of one row from another's
_TRUSTED = 3  # timed blocks of a choice after which the table is no longer hoped for
Cost = Callable[[base.Bucket, base.DraftStrategy], float]  # seconds of a round, as measured


@dataclasses.dataclass(frozen=True)
class Settings:
    """Numbers of the controller.

    Attributes:
      window: judged drafts of the first depth that count, at least; older ones fade.
      window_rounds: the same in rounds, so that many rows, which judge many drafts in little
        time, are known more exactly.
      surprise: standard errors by which a block's acceptance may differ from the window's; beyond
        it the drafter has changed, and what was seen before hardly counts.
      explore: share of the time that trying other choices may cost.
      trial_rounds: rounds of a block that tries; known: judged drafts until a choice is known.
      prior: acceptance assumed before any draft was judged, worth `prior_weight` drafts.
      hope: standard errors added to the acceptance of a choice that might be tried.
      times: latest times per round kept of each (bucket, strategy), of which the median counts.
      frozen: ignore the blocks' own times, so that decisions never depend on a clock.
      keep: share of the counts that survives an update of the weights.
    """

    window: float = 256.0
    window_rounds: float = 96.0
    surprise: float = 4.0
    explore: float = 0.02
    trial_rounds: int = 4
    known: float = 32.0
    prior: float = 0.5
    prior_weight: float = 4.0
    hope: float = 2.0
    times: int = 7
    frozen: bool = False
    keep: float = 0.5


def controller(
    arms: Callable[[int], Sequence[base.DraftStrategy]],
    cost: Cost,
    settings: Settings = Settings(),
) -> strategy.Controller:
    """Make the controller; `arms(rows)` are its choices in a bucket, plain decoding added.

    `cost` gives the seconds of a round before any block was timed.
    """

    def possible(rows: int) -> tuple[base.DraftStrategy, ...]:
        return tuple(dict.fromkeys((base.PLAIN, *arms(rows))))

    def choose(memory, now, rounds) -> strategy.Choice:
        seconds, value = weigh(memory, now)
        best = max(value, key=value.__getitem__)
        tried = _trial(memory, settings, cost, now, seconds, value, best) or best
        seen = _at(_counts(memory, tried, now.bucket.rows), "tried", 0)
        known = not tried.depth or seen >= settings.known
        short = tried != best or not known
        return strategy.Choice(tried, min(settings.trial_rounds, rounds) if short else rounds)

    def weigh(memory, now) -> tuple[dict, dict]:
        """Estimate each choice's seconds of a round, and its tokens of a row per second."""
        choices = possible(now.bucket.rows)
        seconds = {s: _seconds(memory, cost, now.bucket, s) for s in choices}
        return seconds, {s: expected_tokens(memory, s, settings, now) / seconds[s] for s in choices}

    def observe(memory, outcome) -> strategy.Memory:
        if not outcome.rounds:
            return memory
        seconds, value = weigh(memory, outcome.situation)
        if settings.frozen or math.isnan(outcome.seconds):
            outcome = outcome._replace(seconds=seconds[outcome.strategy] * outcome.rounds)
        else:
            memory = _clock(memory, outcome, cost, settings.times)
        memory = _spend(memory, outcome, value)
        rows = outcome.row_rounds / outcome.rounds
        return _count(memory, outcome, settings, rows)

    def renew(memory) -> strategy.Memory:
        fresh = {name: memory.get(name, 0.0) * settings.keep for name in ("clock", "spent")}
        return memory | fresh | {"drafts": _faded(memory.get("drafts", {}), settings.keep)}

    return strategy.Controller("goodput", possible, choose, observe, renew)


def expected_tokens(
    memory: strategy.Memory,
    choice: base.DraftStrategy,
    settings: Settings,
    now: strategy.Situation,
    hope: float = 0.0,
) -> float:
    """Estimate the tokens that a row's round emits: 1 + sum_i prod_{j <= i} a_j.

    a_j, the acceptance at depth j given that of j - 1, is the rate of the drafter's chains in this
    bucket, or a tree's own drawn towards that, widened to its children; `hope` adds so many of
    its standard errors. A strategy that shares drafts out among rows is known by what its rows
    got, drawn towards what the chains' rates promise for as many drafts.
    """
    own = _counts(memory, choice, now.bucket.rows)
    rates = _chain_rates(memory, choice, settings, now.bucket.rows)
    if choice.share:
        return 1 + _shared(own, rates, choice, settings, now, hope)
    total = reach = 1.0
    for j, rate in enumerate(rates):
        if not choice.chain:
            rate = _rate(own, j, costs.widened(rate, choice), settings.prior_weight)
        error = math.sqrt(rate * (1 - rate) / (_at(own, "tried", j) + settings.prior_weight))
        reach *= min(rate + hope * error, 1.0)
        total += reach
    return total


def _chain_rates(memory, choice: base.DraftStrategy, settings: Settings, rows: int) -> list[float]:
    """Estimate the acceptance by depth of a drafter's chains in a bucket.

    The rows that are left in a small bucket are other rows than those of a large one, often such
    as are hard to draft for; so each bucket's own counts are drawn towards those of all.
    """
    drafts = memory.get("drafts", {})
    everywhere = drafts.get(f"{choice.drafter}:1", {})
    here = drafts.get(f"{choice.drafter}:1/{rows}", {})
    rates, above = [], settings.prior
    for j in range(choice.depth):
        above = _rate(everywhere, j, above, settings.prior_weight)
        rates.append(_rate(here, j, above, settings.known))
    return rates


def _shared(own, rates, choice, settings: Settings, now: strategy.Situation, hope: float) -> float:
    """Estimate the drafts that a row gets right where a bucket's rows share them."""
    reach = list(itertools.accumulate(rates, operator.mul))
    drafts = choice.total(now.bucket.rows) / now.live - 1
    promised, seen = costs.spread(reach, drafts), own.get("rows", 0.0)
    weight = settings.prior_weight
    right = (sum(own.get("accepted", ())) + weight * promised) / (seen + weight)
    return right + hope * math.sqrt(right * (1 + right) / (seen + weight))  # of a geometric count


def _family(choice: base.DraftStrategy, rows: int) -> str:
    """Name the strategies whose drafts at a depth are the same: all chains of a drafter."""
    if choice.share:
        return f"{choice}/{rows}"
    if choice.chain:
        return f"{choice.drafter}:1/{rows}"
    return f"{choice.drafter}:{choice.depth}:{choice.width}:{choice.nodes}/{rows}"


def _counts(memory: strategy.Memory, choice: base.DraftStrategy, rows: int) -> dict:
    return memory.get("drafts", {}).get(_family(choice, rows), {})


def _at(counts: dict, name: str, depth: int) -> float:
    values = counts.get(name, ())
    return float(values[depth]) if depth < len(values) else 0.0


def _rate(counts: dict, depth: int, guess: float, weight: float) -> float:
    accepted, tried = _at(counts, "accepted", depth), _at(counts, "tried", depth)
    return (accepted + weight * guess) / (tried + weight)


def _trial(memory, settings, cost: Cost, now, seconds, value, best) -> base.DraftStrategy | None:
    """Choose what to try now: the most hopeful choice that may beat the best, if affordable."""

    def hopeful(s: base.DraftStrategy) -> float:
        tokens = expected_tokens(memory, s, settings, now, settings.hope)
        return tokens / _seconds(memory, cost, now.bucket, s, hope=True)

    hopes = {s: hopeful(s) for s in value if s != best and s.depth}
    hopes = {s: hope for s, hope in hopes.items() if hope > value[best]}
    if not hopes:
        return None
    trial = max(hopes, key=hopes.__getitem__)
    loss = settings.trial_rounds * seconds[trial] * (1 - value[trial] / value[best])
    start = settings.trial_rounds**2 * seconds[base.PLAIN]  # to get to know anything at all
    allowed = settings.explore * memory.get("clock", 0.0) + start * (settings.explore > 0)
    return trial if memory.get("spent", 0.0) + loss <= allowed else None


def _spend(memory, outcome: strategy.Outcome, value: dict) -> strategy.Memory:
    """Book a block's time, and what of it was lost against the best known choice."""
    seconds, lost = outcome.seconds, 0.0
    best = max(value.values())
    if value[outcome.strategy] < best:
        rows = outcome.row_rounds / outcome.rounds
        lost = max(seconds - outcome.emitted / (best * rows), 0.0)
    return memory | {
        "clock": memory.get("clock", 0.0) + seconds,
        "spent": memory.get("spent", 0.0) + lost,
    }


def _count(memory, outcome: strategy.Outcome, settings: Settings, rows: float) -> strategy.Memory:
    """Add a block's judged drafts to its bucket's, those of a chain to all buckets' too."""
    choice = outcome.strategy
    if not choice.depth:
        return memory
    drafts = memory.get("drafts", {})
    families = [_family(choice, outcome.situation.bucket.rows)]
    if choice.chain and not choice.share:
        families.append(f"{choice.drafter}:1")
    new = {name: _added(drafts.get(name, {}), outcome, settings, rows) for name in families}
    return memory | {"drafts": drafts | new}


def _added(old: dict, outcome: strategy.Outcome, settings: Settings, rows: float) -> dict:
    """Add a block's drafts; what exceeds the window fades, and what they contradict."""
    window = max(settings.window, settings.window_rounds * rows)
    fade = max(1 - outcome.tried[0] / window, 0.0)  # of all depths, lest the deep ones stay stale
    if _contradicts(old, outcome, settings.surprise, rows):
        fade = min(fade, settings.known / _at(old, "tried", 0))
    found = {
        name: [_at(old, name, j) * fade + x for j, x in enumerate(getattr(outcome, name))]
        for name in ("accepted", "tried")
    }
    if outcome.strategy.share:
        found["rows"] = old.get("rows", 0.0) * fade + outcome.row_rounds
    return found


def _contradicts(counts: dict, outcome: strategy.Outcome, limit: float, rows: float) -> bool:
    """Compare a block's acceptance of first drafts with the counted one, as two proportions.

    Rows differ among each other, whatever the drafter: few of them prove little.
    """
    before, now = _at(counts, "tried", 0), outcome.tried[0]
    if not before or not now:
        return False
    accepted = _at(counts, "accepted", 0)
    pooled = (accepted + outcome.accepted[0]) / (before + now)
    variance = pooled * (1 - pooled) * (1 / before + 1 / now) + _ROWS_DIFFER**2 / rows
    return abs(accepted / before - outcome.accepted[0] / now) > limit * math.sqrt(variance)


def _faded(drafts: dict, keep: float) -> dict:
    return {
        family: {name: _times(keep, values) for name, values in counts.items()}
        for family, counts in drafts.items()
    }


def _times(keep: float, values):
    return [x * keep for x in values] if isinstance(values, list) else values * keep


def _key(bucket: base.Bucket, choice: base.DraftStrategy) -> str:
    return f"{bucket.rows}/{bucket.slots}/{choice}"


def _seconds(memory, cost: Cost, bucket, choice: base.DraftStrategy, hope: bool = False) -> float:
    """Estimate the seconds of a round: the median of its latest, else the table's, corrected by
    how wrong the table was about this drafter.

    With `hope` the shortest that they may be: one slow block, on a machine that others use too,
    must not put a choice out for good.
    """
    seen = memory.get("times", {}).get(_key(bucket, choice), ())
    off = memory.get("off", {}).get(choice.drafter, ())
    told = cost(bucket, choice) * (statistics.median(off) if off else 1.0)
    if not hope:
        return statistics.median_low(seen) if seen else told
    return min(seen) if len(seen) >= _TRUSTED else min((*seen, told, cost(bucket, choice)))


def _clock(memory, outcome: strategy.Outcome, cost: Cost, kept: int) -> strategy.Memory:
    """Note a block's seconds per round, and how wrong the table was about them."""
    bucket, choice = outcome.situation.bucket, outcome.strategy
    seconds = outcome.seconds / outcome.rounds
    times, off = memory.get("times", {}), memory.get("off", {})
    key, wrong = _key(bucket, choice), seconds / cost(bucket, choice)
    return memory | {
        "times": times | {key: [*times.get(key, ()), seconds][-kept:]},
        "off": off | {choice.drafter: [*off.get(choice.drafter, ()), wrong][-kept:]},
    }
