"""The estimated pressure of future requests, from past arrivals."""

import random

import pytest

from varlen.scheduling.load import LoadMeter


def poisson(meter, rate, share, seconds, seed=0):
    numbers, now = random.Random(seed), 0.0
    while now < seconds:
        now += numbers.expovariate(rate)
        meter.arrived(now, seconds=share)
    return now


@pytest.mark.parametrize("seconds", [2.0, 60.0])
def test_pressure_is_rate_times_backlog_over_the_free_share_of_time(seconds):
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


def test_without_arrivals_there_is_no_pressure():
    assert LoadMeter().pressure(5.0, 1.0) == 0.0


def test_one_arrival_just_now_says_nothing_about_the_rate():
    meter = LoadMeter()
    meter.arrived(5.0, seconds=1.0)

    assert meter.pressure(5.0, 1.0) == 0.0


def test_old_arrivals_are_forgotten():
    meter = LoadMeter()
    now = poisson(meter, 200.0, 0.004, 30.0)

    assert meter.pressure(now + 60.0, 0.1) < 0.01 * meter.pressure(now, 0.1)
