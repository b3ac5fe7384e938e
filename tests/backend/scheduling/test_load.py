"""Rates, pressure and patience, against what was sent."""

import random

import pytest

from varlen.scheduling.load import LoadMeter


def poisson(meter, rate, share, seconds, seed=0):
    numbers, now = random.Random(seed), 0.0
    while now < seconds:
        now += numbers.expovariate(rate)
        meter.arrived(now, seconds=share, backlog_seconds=0.0)
    return now


@pytest.mark.parametrize("seconds", [2.0, 60.0])
def test_pressure_is_rate_times_backlog_over_what_is_free(seconds):
    meter = LoadMeter()
    now = poisson(meter, rate=200.0, share=0.0025, seconds=seconds)

    # half of the time is free
    assert meter.pressure(now, 0.1) == pytest.approx(200 * 0.1 / 0.5, rel=0.3)


def test_pressure_grows_with_the_load_and_stays_finite():
    pressures = []
    for share in (0.001, 0.004, 0.0049, 0.01):
        meter = LoadMeter()
        pressures.append(meter.pressure(poisson(meter, 200.0, share, 30.0), 0.1))

    assert pressures == sorted(pressures)
    assert pressures[-1] < 1e4


def test_nothing_came_so_nothing_presses():
    meter = LoadMeter()

    assert meter.pressure(5.0, 1.0) == 0.0
    assert meter.usual_wait() == 0.0


def test_what_is_long_past_is_forgotten():
    meter = LoadMeter()
    now = poisson(meter, 200.0, 0.004, 30.0)

    assert meter.pressure(now + 60.0, 0.1) < 0.01 * meter.pressure(now, 0.1)


def test_the_usual_wait_is_that_of_nearly_all_in_order():
    meter = LoadMeter()
    # ten at once, of a second each: they would be done after 1, 2, ... 10 seconds
    for already in range(10):
        meter.arrived(0.0, seconds=1.0, backlog_seconds=float(already))

    assert meter.usual_wait() == 9.0


def test_the_usual_wait_forgets_the_past():
    meter = LoadMeter()
    meter.arrived(0.0, seconds=100.0, backlog_seconds=0.0)
    for number in range(500):
        meter.arrived(1000.0 + number, seconds=0.5, backlog_seconds=0.0)

    assert meter.usual_wait() == 0.5
