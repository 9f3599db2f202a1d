// Fused attention with many query rows on Hopper: producer warpgroups turn pages of any format into 16-bit keys and
// values in shared memory, consumer warpgroups of 64 rows multiply them (wgmma) and keep their rows' state.
//
// Invariant: consumers and producers meet at four barriers for each stage (keys and values, full and empty) and nowhere
// else; the producers follow the records of one more warp, the stream, and the consumers a walk of their own that
// agrees with it. A tile that is wholly a unit's is finished by it; of any other each unit leaves a partial state that
// combine.cuh joins, with places as in join_block.cuh for blocks of one warp.
//
// Error bound, against the exact result on the same stored bytes, per element of an fp32 output:
//   |error| <= (exp(2 E) - 1 + u) * max|V|,   lse: |error| <= E + 2^-10 + 2^-20 |lse|
//   u: 2^-10 in fp16 (a weight and a quantized value in 11 bits each), 2^-7 in bf16 (8 bits, scale and midpoint of a
//     value too), and 2^-27 for each key that the row sees: the tensor cores add with truncation.
//   E, one logit: 2^-20 * scale * sum|q_i| (|k_i| + c s_i) + 2^-20 |logit|
//     + e * scale * sqrt(sum (q_i (|k_i| + c s_i))^2) if the row sees quantized pages: a key in 11 bits, e = 2^-10; in
//     bf16 e = 2^-6: key, scale and midpoint in 8 bits; 6 standard deviations.
#pragma once

#include "kernels/cuda/prefill_pages.cuh"
#include "kernels/cuda/prefill_rows.cuh"

namespace kvq::cuda {

template <typename Shape>
struct PrefillMap {                                              // shared addresses
  std::uint32_t keys, values, queries, ring, full[2], empty[2];  // barriers of the stages of keys, of values
  std::uint32_t raw_full, raw_empty, page;

  __device__ PrefillMap(std::uint32_t base, const PrefillRecords<Shape::kRows>& records)
      : keys(base),
        values(base + Shape::kStages * Shape::kStageBytes),
        queries(base + 2 * Shape::kStages * Shape::kStageBytes),
        ring(base + Shape::kRingAt),
        full{shared_address(records.full[0]), shared_address(records.full[1])},
        empty{shared_address(records.empty[0]), shared_address(records.empty[1])},
        raw_full(shared_address(records.raw_full)),
        raw_empty(shared_address(records.raw_empty)),
        page(shared_address(records.page)) {}

  __device__ void init(std::uint32_t raw_slots) const {
    for (std::uint32_t i = 0; i < 2 * Shape::kStages; ++i) {
      prepare_barrier(full[i / Shape::kStages] + 8 * (i % Shape::kStages), 4);
      prepare_barrier(empty[i / Shape::kStages] + 8 * (i % Shape::kStages), 4 * Shape::kConsumers);
    }
    for (std::uint32_t s = 0; s < raw_slots; ++s) {
      prepare_barrier(raw_full + 8 * s, 1);
      prepare_barrier(raw_empty + 8 * s, 4);
    }
    fence_writes();
  }
};

// One warp of a producer warpgroup: the first has the pages of even number, the second the others.
template <typename Shape, Dtype kType>
struct Producer {
  static constexpr std::uint32_t kD = Shape::kD, kPartBytes = kPageTokens * kD * 2;
  const AttendParams& p;
  const PrefillMap<Shape>& map;
  const std::uint32_t group, thread, lane;  // which warpgroup; in it; in the warp
  std::uint32_t stage = 0, parity = 0;
  bool pending = false;  // the dense page before has been asked for, but not told of

  __device__ __forceinline__ void await_empty(std::uint32_t part) const {
    wait_barrier(map.empty[part] + 8 * stage, parity ^ 1);
  }
  // What this thread has written of a stage's keys (0) or values (1) is there.
  __device__ __forceinline__ void tell(std::uint32_t part, std::uint32_t of) const {
    fence_writes();
    __syncwarp();
    if (lane == 0) arrive_barrier(map.full[part] + 8 * of);
  }

  // Tells of a pending page, when all but the last kLeft dense pages are there.
  template <std::uint32_t kLeft>
  __device__ __forceinline__ void settle() {
    if (!pending) return;
    wait_copies<kLeft>();
    const std::uint32_t before = (stage + Shape::kStages - Shape::kProducers) % Shape::kStages;
    tell(0, before);
    tell(1, before);
    pending = false;
  }

  // The page before is told of as soon as keys have room again, not when values have: these are left a page later.
  __device__ __forceinline__ void copy(const PageRecord& page, std::uint32_t keys, std::uint32_t values) {
    const std::uint64_t from = page.block & ~kKindMask;
    await_empty(0);
    copy_rows<kD>(from, keys, 0, kPageTokens, thread);
    commit_copies();
    settle<1>();
    await_empty(1);
    copy_rows<kD>(from + kPartBytes, values, page.tokens % 256, page.tokens / 256, thread);
    commit_copies();
    pending = true;
  }

  __device__ __forceinline__ void decode(const PageDecoder<kD, kType>& decoder, Kind kind, std::uint32_t block,
                                         std::uint32_t keys, std::uint32_t values) {
    await_empty(0);
    if (kind <= Kind::k8v4) {
      decoder.keys(kind, block, keys);
    } else {
      fill_rows_with<kD>(kind == Kind::fault ? 0x7fff7fffu : 0, keys, thread);
    }
    settle<0>();
    tell(0, stage);
    await_empty(1);
    if (kind <= Kind::k8v4) {
      decoder.values(kind, block, values);
    } else {
      fill_rows_with<kD>(0, values, thread);
    }
    tell(1, stage);
  }

  __device__ void run() {
    const PageDecoder<kD, kType> decoder(thread / 32, lane);
    stage = group;
    for (std::uint32_t slot = group, slot_parity = 0;;) {
      wait_barrier(map.raw_full + 8 * slot, slot_parity);
      const PageRecord page = load_record(map.page + 16 * slot);
      if (page.bytes == kNoMorePages) break;
      const Kind kind = static_cast<Kind>(page.block & kKindMask);
      const std::uint32_t keys = map.keys + stage * Shape::kStageBytes,
                          values = map.values + stage * Shape::kStageBytes;
      if (kind == Kind::dense) {
        copy(page, keys, values);
      } else {
        decode(decoder, kind, map.ring + slot * p.slot_bytes, keys, values);
      }
      __syncwarp();
      if (lane == 0) arrive_barrier(map.raw_empty + 8 * slot);
      stage += Shape::kProducers;
      if (stage >= Shape::kStages) stage -= Shape::kStages, parity ^= 1;
      slot += Shape::kProducers;
      if (slot >= p.stages) slot -= p.stages, slot_parity ^= 1;
    }
    settle<0>();
  }
};

// One warp of a consumer warpgroup.
template <typename Shape, Dtype kType, bool kPlain>
struct Consumer {
  const AttendParams& p;
  const PrefillMap<Shape>& map;
  const std::uint32_t group, thread, lane;
  const std::uint32_t query_operand, key_operand, value_operand;  // of the first stage
  std::uint32_t leads_warp, vote_barrier;
  Turn<Shape::kStages> key_turn, value_turn;
  RowGroup<Shape::kD, kType, kPlain> rows;

  __device__ __forceinline__ Consumer(const AttendParams& p, const PrefillMap<Shape>& map, std::uint32_t group,
                                      std::uint32_t thread, std::uint32_t lane)
      : p(p),
        map(map),
        group(group),
        thread(thread),
        lane(lane),
        query_operand(of_warp(operand_at(queries(), 16))),
        key_operand(operand_at(map.keys, 16)),
        value_operand(operand_at(map.values, kPageTokens * 128)),
        leads_warp(lane == 0 ? 1 : 0),
        vote_barrier(1 + group) {
    keep(leads_warp);
    keep(vote_barrier);
  }

  __device__ __forceinline__ std::uint32_t keys_barrier(const Turn<Shape::kStages>& turn) const {
    return map.full[0] + 8 * turn.stage;
  }
  __device__ __forceinline__ std::uint32_t values_barrier(const Turn<Shape::kStages>& turn) const {
    return map.full[1] + 8 * turn.stage;
  }
  __device__ __forceinline__ std::uint32_t keys_at() const {
    return of_warp(key_operand + key_turn.stage * (Shape::kStageBytes / 16));
  }
  __device__ __forceinline__ std::uint32_t values_at() const {
    return of_warp(value_operand + value_turn.stage * (Shape::kStageBytes / 16));
  }
  __device__ __forceinline__ void leave(std::uint32_t empty, Turn<Shape::kStages>& turn) {
    if (leads_warp != 0) arrive_barrier(empty + 8 * turn.stage);
    turn.next();
  }
  // The slow way to a page's weights, of the warpgroup; nothing else is on its way.
  __device__ __forceinline__ void start_over(std::uint32_t page, float (&s)[32]) {
    rows.ask_scores(query_operand, keys_at(), s);
    products_wait<0>();
    hold(s);
    hold(rows.out);
    rows.raise_and_weigh(p, static_cast<std::int32_t>(page * kPageTokens), lane, s);
  }

  // The scores of a page are on their way while the values of the page before are; they become weights while these
  // are. A turn begins with the sums of weights and ends with exponentials: in one stretch of code without branches the
  // wait for values would go ahead of the exponentials, and each of these be waited for before the next but one. The
  // barriers are looked at where there is time, and waited at only if need be.
  __device__ __forceinline__ void pages(std::uint32_t begin, std::uint32_t end) {
    if (begin >= end) return;
    float s[32];
    std::uint32_t weight[4][4];
    wait_barrier(keys_barrier(key_turn), key_turn.parity);
    rows.ask_scores(query_operand, keys_at(), s);
    products_wait<0>();
    hold(s);
    rows.weigh(p, static_cast<std::int32_t>(begin * kPageTokens), lane, s);
    bool has_values;
#pragma unroll 1
    for (std::uint32_t page = begin;;) {
      const Turn<Shape::kStages> next_keys = key_turn.after(),
                                 next_values = page == begin ? value_turn : value_turn.after();
      const bool has_keys = barrier_is_over(keys_barrier(next_keys), next_keys.parity);
      has_values = barrier_is_over(values_barrier(next_values), next_values.parity);
      if (!rows.add_up(s, vote_barrier)) start_over(page, s);
      leave(map.empty[0], key_turn);
      const std::uint32_t keys = keys_at();
      products_wait<0>();
      hold(rows.out);
      if (page != begin) leave(map.empty[1], value_turn);
      const std::uint32_t values = values_at();
      rows.pack(s, weight);
      if (++page == end) break;
      if (!has_keys) wait_barrier(keys_barrier(key_turn), key_turn.parity);
      rows.ask_scores(query_operand, keys, s);
      if (!has_values) wait_barrier(values_barrier(value_turn), value_turn.parity);
      rows.ask_values(values, weight);
      products_wait<1>();
      hold(s);
      rows.weigh(p, static_cast<std::int32_t>(page * kPageTokens), lane, s);
    }
    if (!has_values) wait_barrier(values_barrier(value_turn), value_turn.parity);
    rows.ask_values(values_at(), weight);
    products_wait<0>();
    hold(rows.out);
    leave(map.empty[1], value_turn);
  }

  __device__ std::uint32_t queries() const { return map.queries + group * (Shape::kHalves * kGroupRows * 128); }
  __device__ __forceinline__ void meet() const { group_barrier(1 + group, kGroupThreads); }

  __device__ __forceinline__ bool step(PrefillRecords<Shape::kRows>& records) const {
    const std::uint32_t warp = group * 4 + thread / 32;
    TilePiece next;
    const bool more = next_piece(p, records.walk[warp], next);
    if (more && lane == 0) records.piece[warp] = next;
    __syncwarp();
    return more;
  }

  __device__ void run(PrefillRecords<Shape::kRows>& records, const Shares& shares) {
    const std::uint32_t unit = blockIdx.x, row = group * kGroupRows + thread / 32 * 16 + lane / 4;
    const bool leads = group == 0 && thread == 0;
    constexpr std::uint32_t kFloats = partial_floats(Shape::kRows, Shape::kD);
    if (leads) p.tails[unit] = {0, kNoUnit, 0, 0, 0, 0};
    const TilePiece& piece = records.piece[group * 4 + thread / 32];  // too much to be kept in registers
    while (step(records)) {
      meet();
      rows.begin(p, piece, piece.tile * Shape::kRows + group * kGroupRows, thread, queries());
      fence_writes();
      meet();
      pages(piece.page_begin, piece.page_end);
      rows.finish_sums();
      if (piece.begins && piece.ends) {
        rows.write_rows(p, piece, piece.tile * Shape::kRows + row, lane);
        continue;
      }
      rows.write_state(p.partials + (2 * std::uint64_t{unit} + (piece.last ? 1 : 0)) * kFloats, Shape::kRows, row,
                       lane);
      if (leads && piece.begins) {
        const std::uint64_t tile_end = piece.tile_end;
        const std::uint32_t end_unit = shares.unit_of(tile_end - 1);
        const bool early = shares.unit_begin(end_unit + 1) != tile_end;
        const std::uint32_t first_row = piece.tile * Shape::kRows;
        p.tails[unit] = {end_unit - early - unit + 1,
                         early ? end_unit : kNoUnit,
                         piece.sequence,
                         piece.head,
                         first_row,
                         min(Shape::kRows, piece.of.queries * p.group - first_row)};
      }
    }
  }
};

template <std::uint32_t kD, std::uint32_t kConsumers, Dtype kType, bool kPlain>
__global__ void __launch_bounds__(PrefillShape<kD, kConsumers>::kThreads, 1)
    prefill_kernel(const __grid_constant__ AttendParams p) {
#if KVQ_WARPGROUPS
  using Shape = PrefillShape<kD, kConsumers>;
  std::byte* const shared = dynamic_shared<1024>();
  auto& records = *reinterpret_cast<PrefillRecords<Shape::kRows>*>(shared);
  static_assert(sizeof(records) <= kRecordBytes);
  const PrefillMap<Shape> map(shared_address(shared) + kRecordBytes, records);
  const std::uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.x / kGroupThreads;
  const std::uint32_t thread = threadIdx.x % kGroupThreads;
  if (threadIdx.x == 0) map.init(p.stages);
  wait_for_launch_before();  // which may still be writing what is read here
  let_next_launch_begin();
  TileCosts<Shape::kRows> costs{p.group, false};
  const Shares shares = costs.shares(p, gridDim.x, lane);
  constexpr std::uint32_t kGroups = kConsumers + Shape::kProducers;
  if (warp < 4 * kConsumers || warp == 4 * kGroups) {  // the consumers' walks and the stream's
    const std::uint64_t begin = shares.unit_begin(blockIdx.x), end = shares.unit_begin(blockIdx.x + 1);
    TileWalk<Shape::kRows> walk;
    walk.begin(p, costs, begin, end - begin, lane);
    if (lane == 0) records.walk[warp == 4 * kGroups ? 8 : warp] = walk;
  }
  __syncthreads();
  if (group < kConsumers) {
    take_registers<Shape::kConsumerRegisters, true>();
    Consumer<Shape, kType, kPlain> consumer(p, map, group, thread, lane);
    consumer.run(records, shares);
  } else if (group < kGroups) {
    take_registers<Shape::kProducerRegisters, false>();
    Producer<Shape, kType> producer{p, map, group - kConsumers, thread, lane};
    producer.run();
  } else {
    take_registers<Shape::kStreamRegisters, false>();
    if (warp != 4 * kGroups) return;
    RawStream<kD, Shape::kRows> stream(p, records, {map.ring, map.raw_full, map.raw_empty, map.page}, lane);
    stream.run();
  }
#endif
}

}  // namespace kvq::cuda
