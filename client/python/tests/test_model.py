"""SmolLM2 over kvq: equal to plain numpy while pages are dense, close to it when they are int4."""

import time

import numpy as np
import pytest

import kvqd
from kvqd.models import kvq_cache, numpy_cache
from kvqd.models.llama import log_likelihood
from kvqd.testing import local_daemon

# Both sides hold K and V as fp16. A different order of sums moves a key or value that lies at a rounding boundary to
# its neighbour (2^-11 relative), which through 30 layers moves logits (of spread about 6) by some hundredths.
LOGIT_TOLERANCE = 0.1


def numpy_logits(llama, sequence, tokens, chunk=256):
    out = []
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        with numpy_cache.NumpyBatch([(sequence, len(part))]) as batch:
            out.append(llama.logits(llama.hidden(part, batch)))
    return np.concatenate(out)


def kvq_logits(llama, model, sequence, tokens, chunk=256):
    out = []
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        with kvq_cache.KvqBatch(model, [(sequence, part)], deadline_ms=10000) as batch:
            out.append(llama.logits(llama.hidden(part, batch)))
    return np.concatenate(out)


@pytest.fixture
def model(daemon, llama):
    with kvqd.Client(daemon.socket, label="model test") as client:
        with kvq_cache.register(client, llama.config, llama.weights.fingerprint) as model:
            yield model


def test_the_model_speaks_english(llama, tokenizer):
    sequence, out = numpy_cache.NumpySequence(llama.config), []
    new = tokenizer.encode("The capital of France is")
    for _ in range(3):
        with numpy_cache.NumpyBatch([(sequence, len(new))]) as batch:
            new = [int(llama.next_logits(new, batch)[0].argmax())]
        out += new
    assert tokenizer.decode(out).startswith(" Paris.")


def test_the_tokenizer_round_trips_and_keeps_special_tokens_out_of_text(tokenizer, document):
    odd = "12345 naïve 日本 \t\n  it's 3.14 \U0001f600\r\n<|im_start|>"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd
    assert tokenizer.start_of_turn not in tokenizer.encode(odd)
    assert tokenizer.decode(document) == open("/usr/share/common-licenses/GPL-3").read()
    assert tokenizer.decode(tokenizer.encode_chat([("user", "hi")])).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("chunk", [256, 100])
def test_dense_pages_give_the_logits_of_plain_numpy(llama, model, document, chunk):
    tokens = document[:600]
    plain = numpy_logits(llama, numpy_cache.NumpySequence(llama.config, np.float16), tokens)
    paged = kvq_cache.KvqSequence.open(model, tokens, private=True)
    ours = kvq_logits(llama, model, paged, tokens, chunk)
    assert np.abs(ours - plain).max() < LOGIT_TOLERANCE
    near_tie = np.sort(plain, axis=1)[:, -1] - np.sort(plain, axis=1)[:, -2] < 2 * LOGIT_TOLERANCE
    assert ((ours.argmax(axis=1) == plain.argmax(axis=1)) | near_tie).all()
    unrounded = numpy_logits(llama, numpy_cache.NumpySequence(llama.config), tokens)
    targets = np.array(document[1:601])
    assert log_likelihood(ours, targets).mean() == pytest.approx(log_likelihood(unrounded, targets).mean(), abs=0.005)


def test_sequences_of_a_batch_do_not_mix(llama, model, document):
    texts = [document[at : at + size] for at, size in ((0, 130), (700, 64), (1500, 33))]
    together = [kvq_cache.KvqSequence.open(model, text, private=True) for text in texts]
    with kvq_cache.KvqBatch(model, list(zip(together, texts)), deadline_ms=10000) as batch:
        logits = llama.next_logits(sum(texts, []), batch)
    for row, text in zip(logits, texts):
        alone = numpy_logits(llama, numpy_cache.NumpySequence(llama.config, np.float16), text)[-1]
        assert np.abs(row - alone).max() < LOGIT_TOLERANCE


def test_a_failed_pass_commits_nothing(llama, model, document):
    sequence = kvq_cache.KvqSequence.open(model, document[:64], private=True)
    with pytest.raises(ZeroDivisionError):
        with kvq_cache.KvqBatch(model, [(sequence, document[:64])], deadline_ms=10000):
            raise ZeroDivisionError
    assert sequence.length == 0 and sequence.sequence.info().committed_tokens == 0
    plain = numpy_logits(llama, numpy_cache.NumpySequence(llama.config, np.float16), document[:64])
    assert np.abs(kvq_logits(llama, model, sequence, document[:64]) - plain).max() < LOGIT_TOLERANCE


def test_quantized_pages_keep_the_models_predictions(llama, document):
    """The prefix turns int4 under the reader; the next tokens of the document are then scored against it."""
    prefix, rest = document[:1024], document[1024:1281]
    targets = np.array(rest[1:])
    plain = numpy_cache.NumpySequence(llama.config, np.float16)
    numpy_logits(llama, plain, prefix)
    dense = numpy_logits(llama, plain, rest[:-1])
    # 5 dense pages fill a slab, so 16 pages hold 4 of 31 slabs: above 5 %.
    with local_daemon(quantize_at=0.05, relief=0.02, residual_window_pages=2) as daemon, kvqd.Client(
        daemon.socket
    ) as client:
        with kvq_cache.register(client, llama.config, llama.weights.fingerprint) as model:
            sequence = kvq_cache.KvqSequence.open(model, prefix)
            kvq_logits(llama, model, sequence, prefix)
            until = time.monotonic() + 20
            while sequence.sequence.info().quantized_pages < 12:
                assert time.monotonic() < until, f"not quantized: {sequence.sequence.info()}"
                time.sleep(0.02)
            ours = kvq_logits(llama, model, sequence, rest[:-1])
    agreement = (ours.argmax(axis=1) == dense.argmax(axis=1)).mean()
    perplexity = [np.exp(-log_likelihood(logits, targets).mean()) for logits in (dense, ours)]
    print(f"agreement {agreement:.3f}, perplexity {perplexity[0]:.3f} dense, {perplexity[1]:.3f} int4")
    assert np.abs(ours - dense).max() > LOGIT_TOLERANCE  # it really read quantized pages
    assert agreement >= 0.85
    assert perplexity[1] <= 1.05 * perplexity[0]
