"""Who may be in a worker's hands at once: only who dies alone is convicted by it."""

from __future__ import annotations

import threading

from tests.conftest import wait_until
from workers.tasks import Company


def test_chunks_run_together_and_one_in_isolation_waits_for_all_of_them_and_keeps_others_out() -> None:
    company = Company()
    seen: list[str] = []
    alone_may_end = threading.Event()

    def alone() -> None:
        with company.alone():
            seen.append("alone begins")
            assert alone_may_end.wait(60)
            seen.append("alone ends")

    def late() -> None:
        with company.together():
            seen.append("late")

    with company.together(), company.together():
        suspect = threading.Thread(target=alone)
        suspect.start()
        wait_until(lambda: company.is_awaited, what="the wish to run alone")
        newcomer = threading.Thread(target=late)
        newcomer.start()
        assert seen == []  # the suspect waits for the two, the newcomer for the suspect
    wait_until(lambda: seen == ["alone begins"], what="running alone")
    alone_may_end.set()
    for thread in (suspect, newcomer):
        thread.join(60)
    assert seen == ["alone begins", "alone ends", "late"]
