"""The policy after workers' deaths, played through: killers end alone after few deaths, chance costs little."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from jobs.dispatch import Fleet, plan_chunks
from storage.queries import PendingRequest
from storage.retries import GROUP_DIVISOR, Death, RetryLimits, judge

LIMITS = RetryLimits(max_attempts=3)
CHUNK_SIZE = 32


class Play:
    """One worker after another takes what dispatch cuts, and dies of what kills it or by chance."""

    def __init__(self, requests: int, killers: set[int], in_hand: int) -> None:
        self.isolation: dict[int, int | None] = dict.fromkeys(range(requests))
        self.killers = killers
        self.in_hand = in_hand
        self.deaths: dict[int, list[Death]] = defaultdict(list)
        self.finished: set[int] = set()
        self.condemned: set[int] = set()
        self.workers_lost = 0
        self.runs = 0

    def next_hand(self, *, isolated_first: bool) -> list[int]:
        """What the next worker has in its hands: chunks of free requests together, or one group in isolation."""
        pending = [PendingRequest(id=n, line=n, prefix_id=None, isolation=size) for n, size in self.isolation.items()]
        chunks = plan_chunks(pending, fleet=Fleet(1, self.in_hand), chunk_size=CHUNK_SIZE)
        isolated = [chunk for chunk in chunks if chunk[0].isolation is not None]
        free = [request for chunk in chunks if chunk[0].isolation is None for request in chunk]
        if isolated and (isolated_first or not free):
            return [request.id for request in isolated[0]]
        return [request.id for request in free[: self.in_hand]]

    def run(self, hand: list[int], *, is_killed: bool) -> None:
        self.runs += len(hand)
        if not is_killed and not self.killers & set(hand):
            self.finished |= set(hand)
            for request in hand:
                del self.isolation[request]
            return
        self.workers_lost += 1
        for request in hand:
            exit_code = -9 if is_killed else -11
            self.deaths[request].append(Death("w", float(self.runs), len(hand) - 1, exit_code))
            sentence = judge(self.deaths[request], self.isolation[request], limits=LIMITS)
            if sentence.is_poison:
                self.condemned.add(request)
                del self.isolation[request]
            else:
                self.isolation[request] = sentence.isolation


def deaths_of_a_killer(in_hand: int) -> int:
    """At most so many workers crash over one killer: one before suspicion, one for each size of group, those alone."""
    deaths, company = 1, in_hand
    while company > 1:
        deaths += 1
        company = -(-company // GROUP_DIVISOR)
    return deaths + LIMITS.max_attempts


def evidence(play: Play, request: int) -> float:
    """Deaths alone, those by chance at half their number."""
    return sum(1.0 if death.exit_code == -11 else 0.5 for death in play.deaths[request] if death.batch_mates == 0)


@given(
    requests=st.integers(1, 300),
    killers=st.sets(st.integers(0, 299), max_size=4),
    in_hand=st.integers(1, 160),
    chance=st.lists(st.booleans(), max_size=30),
    order=st.lists(st.booleans(), max_size=30),
)
def test_killers_are_condemned_after_few_deaths_and_all_others_finish(
    requests: int, killers: set[int], in_hand: int, chance: list[bool], order: list[bool]
) -> None:
    killers = {killer for killer in killers if killer < requests}
    play = Play(requests, killers, in_hand)
    rounds = chances = 0
    while play.isolation:
        is_killed = rounds < len(chance) and chance[rounds]
        isolated_first = order[rounds] if rounds < len(order) else True
        play.run(play.next_hand(isolated_first=isolated_first), is_killed=is_killed)
        chances += is_killed
        rounds += 1
        assert play.workers_lost <= chances + len(killers) * deaths_of_a_killer(in_hand)
    assert play.finished | play.condemned == set(range(requests))
    assert not play.finished & play.condemned
    assert killers <= play.condemned
    # Whoever chance has met alone so often cannot be told from a killer; nobody else is condemned.
    assert all(evidence(play, request) >= LIMITS.max_attempts for request in play.condemned)
    assert len(play.condemned - killers) <= chances // (2 * LIMITS.max_attempts)


@given(requests=st.integers(1, 500), in_hand=st.integers(1, 160), killed_round=st.integers(0, 20))
def test_one_death_by_chance_costs_the_hand_that_it_met_and_isolates_nobody(
    requests: int, in_hand: int, killed_round: int
) -> None:
    play = Play(requests, set(), in_hand)
    rounds = 0
    while play.isolation:
        play.run(play.next_hand(isolated_first=True), is_killed=rounds == killed_round)
        assert set(play.isolation.values()) <= {None}
        rounds += 1
    assert play.runs - requests <= in_hand


def test_a_killer_among_a_full_hand_stands_alone_after_the_fourth_death() -> None:
    play = Play(128, {77}, 128)
    companies = []
    while play.isolation:
        hand = play.next_hand(isolated_first=True)
        if 77 in hand:
            companies.append(len(hand))
        play.run(hand, is_killed=False)
    assert companies == [128, 128, 16, 2, 1, 1, 1]
    assert play.condemned == {77}
    assert len(companies) == deaths_of_a_killer(128)
