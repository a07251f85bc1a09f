from fastgrpo_jax.train import lengths


def test_a_prompts_mean_runs_and_an_unknown_one_gets_the_mean():
    a, b, c = (1, 2), (3,), (4, 4)
    seen = lengths.learn({}, [a, b], [[10, 20], [40, 60]])
    assert lengths.expect(seen, [a, b, c]) == (15.0, 50.0, 32.5)
    seen = lengths.learn(seen, [a], [[30, 40]])
    assert lengths.expect(seen, [a]) == (25.0,)
    assert lengths.expect({}, [a, c]) == (0.0, 0.0)


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(lengths, "KEPT", 2)
    seen = lengths.learn({}, [(1,), (2,)], [[5], [6]])
    seen = lengths.learn(seen, [(1,), (3,)], [[5], [9]])
    assert len(seen) == 2
    assert lengths.expect(seen, [(1,), (3,), (2,)]) == (5.0, 9.0, 7.0)
