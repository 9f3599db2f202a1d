/* A model server that keeps pages and says what attention makes of them: as a real one is built, against the installed libkvq.
 * Reads lines: "look" prints a digest of attention over all its pages (bit for bit what was written decides it) and how often kvqd came
 * back meanwhile; "grow" writes 64 tokens more. Ends with its input.
 *
 * Invariant: what it writes is a function of place alone, so one look equals another exactly when no page has changed. */
#include <kvq/kvq.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, HEADS = 1, QUERY_HEADS = 2, DIM = 64, FIRST_TOKENS = 1600, GROWTH = KVQ_PAGE_TOKENS, MOST_TOKENS = 4096 };

static uint32_t tokens[MOST_TOKENS];
static uint16_t keys[MOST_TOKENS * DIM], values[MOST_TOKENS * DIM];
static int64_t slots[MOST_TOKENS];
static int32_t table[MOST_TOKENS / KVQ_PAGE_TOKENS];

static void must(kvq_status status) {
  if (status == KVQ_OK) return;
  fprintf(stderr, "%s: %s\n", kvq_status_name(status), kvq_last_error());
  exit(1);
}

static uint16_t half(uint32_t place) { /* fp16 of either sign within [0.25, 0.5) */
  uint32_t h = (place + 1) * 2654435761u;
  h ^= h >> 15;
  return (uint16_t)((h & 0x8000u) | 0x3400u | (h & 0x3ffu));
}

static void write_tokens(kvq_model* model, kvq_sequence* sequence, uint64_t first, uint32_t count) {
  uint64_t step = 0;
  uint32_t layer = 0, i = 0;
  must(kvq_reserve(sequence, count, 10000));
  must(kvq_slot_mapping(sequence, first, count, slots));
  must(kvq_step_begin(model, &step));
  for (layer = 0; layer < LAYERS; ++layer) {
    kvq_append_args args;
    for (i = 0; i < count * DIM; ++i) {
      keys[i] = half((uint32_t)first * DIM + i + layer * 7919u);
      values[i] = half((uint32_t)first * DIM + i + layer * 7919u + 104729u);
    }
    memset(&args, 0, sizeof args);
    args.size = sizeof args;
    args.layer = layer;
    args.tokens = count;
    args.k = keys;
    args.v = values;
    args.k_token_stride = args.k_head_stride = args.v_token_stride = args.v_head_stride = DIM;
    args.slots = slots;
    must(kvq_append(model, &args));
  }
  must(kvq_step_end(model, step, NULL));
  must(kvq_commit(sequence, tokens + first, count, 0, 0));
}

static void look(kvq_model* model, kvq_sequence* sequence, int32_t length) {
  const int32_t starts[2] = {0, 1};
  float q[QUERY_HEADS * DIM], out[QUERY_HEADS * DIM];
  uint64_t step = 0, digest = 1469598103934665603ull;
  size_t pages = 0, i = 0;
  uint32_t layer = 0;
  kvq_pressure pressure;
  for (i = 0; i < QUERY_HEADS * DIM; ++i) q[i] = (float)(i % 7) - 3;
  must(kvq_step_begin(model, &step));
  must(kvq_block_table(sequence, table, sizeof table / sizeof *table, &pages));
  for (layer = 0; layer < LAYERS; ++layer) {
    kvq_attend_args args;
    memset(&args, 0, sizeof args);
    args.size = sizeof args;
    args.layer = layer;
    args.batch = 1;
    args.q = q;
    args.out = out;
    args.q_token_stride = args.out_token_stride = QUERY_HEADS * DIM;
    args.q_head_stride = args.out_head_stride = DIM;
    args.q_dtype = args.out_dtype = KVQ_FP32;
    args.query_starts = starts;
    args.seq_lengths = &length;
    args.block_table = table;
    args.block_table_stride = (int64_t)pages;
    args.query_heads = QUERY_HEADS;
    args.window = -1;
    args.threads = 1;
    must(kvq_attend(model, &args));
    for (i = 0; i < sizeof out; ++i) digest = (digest ^ ((const unsigned char*)out)[i]) * 1099511628211ull;
  }
  must(kvq_step_end(model, step, NULL));
  memset(&pressure, 0, sizeof pressure);
  pressure.size = sizeof pressure;
  must(kvq_get_pressure(model, &pressure));
  printf("digest=%016llx reconnects=%u reconnecting=%u lost=%llu\n", (unsigned long long)digest, pressure.reconnects,
         (unsigned)pressure.reconnecting, (unsigned long long)pressure.lost_pages);
}

int main(void) {
  kvq_client* client = NULL;
  kvq_model* model = NULL;
  kvq_sequence* sequence = NULL;
  kvq_layer layers[LAYERS];
  kvq_model_desc desc;
  uint64_t cached = 0;
  uint32_t i = 0, length = FIRST_TOKENS;
  char line[64];
  for (i = 0; i < MOST_TOKENS; ++i) tokens[i] = i % 32000;
  memset(layers, 0, sizeof layers);
  for (i = 0; i < LAYERS; ++i) {
    layers[i].kv_heads = HEADS;
    layers[i].head_dim = DIM;
    layers[i].dtype = KVQ_FP16;
    layers[i].query_heads = QUERY_HEADS;
  }
  memset(&desc, 0, sizeof desc);
  desc.size = sizeof desc;
  desc.layers = layers;
  desc.layer_count = LAYERS;
  desc.page_tokens = KVQ_PAGE_TOKENS;
  desc.fingerprint[0] = 42;
  must(kvq_connect(NULL, &client));
  must(kvq_register_model(client, &desc, &model));
  must(kvq_sequence_open(model, tokens, length, NULL, &cached, &sequence));
  if (cached < length) write_tokens(model, sequence, cached, length - (uint32_t)cached);
  printf("ready cached=%llu\n", (unsigned long long)cached);
  fflush(stdout);
  while (fgets(line, sizeof line, stdin) != NULL) {
    if (strncmp(line, "grow", 4) == 0 && length + GROWTH <= MOST_TOKENS) {
      write_tokens(model, sequence, length, GROWTH);
      length += GROWTH;
    }
    look(model, sequence, (int32_t)length);
    fflush(stdout);
  }
  must(kvq_sequence_release(sequence));
  must(kvq_model_close(model));
  must(kvq_disconnect(client));
  return 0;
}
