"""Adapters that workers have in memory, by name."""

from varlen.memory.memory_use import AdapterUse

ADAPTERS = [("a", ""), ("b", ""), ("cut", "damaged")]


def values(uses):
    found = AdapterUse.metrics(uses, ADAPTERS, 100)
    return {f"{metric.value} {name}": value for (metric, name), value in found.items() if value}


def test_loads_and_evictions_of_all_workers_are_counted_by_name():
    first, second = AdapterUse(3), AdapterUse(3)
    first.record([(0, -1), (1, 0)])
    # a slot whose file could not be read holds nothing
    second.record([(0, -1), (-1, 0), (0, -5)])

    assert values([first, second]) == {
        "varlen_adapter_loads_total a": 3,
        "varlen_adapter_loads_total b": 1,
        "varlen_adapter_evictions_total a": 2,
        "varlen_adapter_resident_bytes a": 100,
        "varlen_adapter_resident_bytes b": 100,
    }


def test_a_worker_that_has_ended_holds_none_and_totals_go_on():
    use = AdapterUse(3)
    use.record([(1, -1)])
    use.forget()

    assert values([use]) == {"varlen_adapter_loads_total b": 1}


def test_a_model_without_workers_has_no_values():
    assert AdapterUse.metrics([], ADAPTERS, 100) == {}
