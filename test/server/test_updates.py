"""New weights and adapters in the real server: between requests, and while they run."""

from __future__ import annotations

import pytest
import torch

from grpo.weights.canary import StaleWeightsError
from grpo.weights.layout import view
from grpo.weights.proof import WeightProof

from ..weights.faults import Changing, nudge
from .real import LENGTH, PROMPT, InFlight, check_follows, close, load, log_probs

pytestmark = pytest.mark.vllm


@pytest.fixture
def server(real_server):
    return real_server


@pytest.fixture
def client(real_client):
    return real_client


def step(params, loss):
    """One step of AdamW, in place; returns how far the farthest value moved."""
    params = list(params)
    before = [param.detach().clone() for param in params]
    optimizer = torch.optim.AdamW(params, lr=3e-2)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return max((param - old).abs().max().item() for param, old in zip(params, before, strict=True))


def test_one_copy_and_what_the_handover_file_maps_follow_every_update(client, server, folders):
    from grpo.weights.handover import Handover, map_tensors
    from grpo.weights.shared import SharedCopy

    model = load(folders[0])
    weights = SharedCopy(model, client, version=client.version)
    mapped = map_tensors(Handover.read(server.log_dir))
    assert weights.unshared() == []
    check_follows(client, model, version=weights.version)
    for _ in range(3):
        version = weights.version
        assert step(model.parameters(), model(torch.tensor([PROMPT])).logits.square().mean()) > 1e-3
        assert weights.publish() == client.version == version + 1
        check_follows(client, model, version=version + 1)
        assert weights.differing() == []
        assert mapped.keys() == weights.tensors.keys()
        assert all(torch.equal(mapped[name], ours) for name, ours in weights.tensors.items())


def test_adapters_over_http_follow_every_update(client, folders, tmp_path):
    pytest.importorskip("peft")
    from grpo.weights.adapters import adapters, adapters_disabled, make_lora
    from grpo.weights.lora import HTTPLoRASync

    torch.manual_seed(0)
    model = make_lora(load(folders[0]), r=4, alpha=12)
    weights = HTTPLoRASync(client, model, folder=tmp_path, version=client.version)
    names = []
    for update in range(3):
        params = [factor for a in adapters(model).values() for factor in (a.a, a.b)]
        assert step(params, model(torch.tensor([PROMPT])).logits.square().mean()) > 1e-3
        version = weights.publish()
        names.append(weights.lora_name)
        check_follows(client, model, version=version)
        assert weights.differing() == []
        assert names[-1].startswith("policy-v") and len(set(names)) == update + 1
    assert client.call("GET", "/lora/status")["loaded_adapters"] == names[-1:]
    # The adapter matters, and goes when it is told to.
    (answer,) = client.generate([PROMPT], max_tokens=12)
    with adapters_disabled(model):
        assert not close(answer.log_probs[0], log_probs(model, PROMPT, answer.tokens[0]))
        client.unload_lora()
        check_follows(client, model, version=version)


@pytest.mark.parametrize("way", ["one memory", "transfer", "adapters"])
def test_a_server_that_misses_an_update_fails_the_proof_where_no_canary_sees_it(
        client, folders, tmp_path, way):
    from grpo.weights.shared import SharedCopy
    from grpo.weights.transfer import WeightTransfer

    model, old = load(folders[0]), client.version
    if way == "one memory":
        weights = SharedCopy(model, client, version=old)

        def lose():  # a mapping of memory that the engine does not use any more
            weights.tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
            for name, param in model.named_parameters():
                param.data = view(weights.places[name], weights.tensors)
    elif way == "transfer":
        weights = WeightTransfer(model, client, backend="gloo", version=old)

        def lose():
            weights._path.send = lambda tensors, deadline: list(tensors)
    else:
        pytest.importorskip("peft")
        from grpo.weights.adapters import make_lora
        from grpo.weights.lora import HTTPLoRASync

        model = make_lora(model, r=4, alpha=12)
        weights = HTTPLoRASync(client, model, folder=tmp_path, version=old - 1)
        weights.publish()

        def lose():
            client.load_lora = lambda path, load=client.load_lora, **options: load(
                str(tmp_path / f"adapter_step_{old + 1}"), **options)
    proof = WeightProof(weights)
    proof.self_test(Changing(model))
    assert weights.version == client.version == old
    for _ in range(2):
        proof.check()
        nudge(model)
        weights.publish()
    lose()
    nudge(model)
    weights.publish()
    check_follows(client, model, version=old + 3)
    with pytest.raises(StaleWeightsError, match="after an update the engine does not have"):
        proof.check()


def update(client, folder, mode, version):
    """New weights while requests run."""
    client.pause(mode)
    client.collective_rpc("load_checkpoint", folder, timeout=30)
    assert client.reset_prefix_cache()
    client.set_version(version)
    client.resume()


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_updates_in_flight_date_every_token_by_the_weights_that_sampled_it(
        client, folders, stream):
    old = client.version
    request = InFlight(client, stream=stream)
    update(client, folders[1], "keep", old + 1)
    client.generate([[5]], max_tokens=20, ignore_eos=True)
    update(client, folders[0], "keep", old + 2)
    for tokens, values, versions, end in request.samples():
        assert len(tokens) == len(versions) == LENGTH and end == "length"
        first, second = versions.count(old), versions.count(old) + versions.count(old + 1)
        assert 2 <= first < second - 2 < second < LENGTH and versions == sorted(versions)
        one, two = (log_probs(folder, PROMPT, tokens) for folder in folders)
        # Between the updates the second weights agree, before and behind them the first, and that
        # to the very token.
        assert close(values[:first], one[:first]) and close(values[second:], one[second:])
        assert close(values[first:second], two[first:second])
        differ = (one - two).abs()
        for edge in (first - 1, first, second - 1, second):
            assert differ[edge] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_that_end_before_the_update_are_the_old_weights_alone(client, folders, mode):
    old = client.version
    request = InFlight(client)
    update(client, folders[1], mode, old + 1)
    for tokens, values, versions, end in request.samples():
        assert (len(tokens) == LENGTH and end == "length" if mode == "wait" else
                2 <= len(tokens) < LENGTH and end == "abort")
        assert versions == [old] * len(tokens)
        assert close(values, log_probs(folders[0], PROMPT, tokens))
    assert client.info()["open_requests"] == 0
    check_follows(client, load(folders[1]), version=old + 1)


@pytest.mark.slow
def test_a_kept_cache_makes_the_prefix_cache_busy_and_the_update_says_so(client, folders):
    from grpo.weights.shared import SharedCopy

    model, old = load(folders[0]), client.version
    weights = SharedCopy(model, client, version=old, timeout=0.5)
    request = InFlight(client)
    client.pause("keep", clear_cache=False)
    assert client.reset_prefix_cache() is False
    with pytest.raises(TimeoutError, match="prefix cache"):
        weights.publish()
    assert weights.version == client.version == old
    client.resume()
    for tokens, values, versions, _ in request.samples():
        assert versions == [old] * LENGTH and close(values, log_probs(model, PROMPT, tokens))
    assert weights.publish() == client.version == old + 1


@pytest.mark.slow
def test_a_new_adapter_leaves_running_requests_to_the_old_one(client, folders, tmp_path):
    pytest.importorskip("peft")
    from grpo.weights.adapters import adapters, make_lora
    from grpo.weights.lora import HTTPLoRASync

    torch.manual_seed(1)
    model = make_lora(load(folders[0]), r=8, alpha=8)
    weights = HTTPLoRASync(client, model, folder=tmp_path, version=client.version)
    weights.publish()
    request, version = InFlight(client), weights.version
    factors = [adapter.b for adapter in adapters(model).values()]
    before = [factor.detach().clone() for factor in factors]
    with torch.no_grad():
        for factor in factors:
            factor.normal_(std=0.1)
    assert weights.publish() == version + 1
    check_follows(client, model, version=version + 1)
    assert len(client.call("GET", "/lora/status")["loaded_adapters"]) == 2
    with torch.no_grad():
        torch._foreach_copy_(factors, before)
    for tokens, values, versions, _ in request.samples():
        assert versions == [version] * LENGTH and close(values, log_probs(model, PROMPT, tokens))
