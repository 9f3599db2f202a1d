// Fused attention with many query rows on Hopper: producer warpgroups turn pages of any format into 16-bit keys and
// values in shared memory, consumer warpgroups of 64 rows multiply them (wgmma) and keep their rows' state.
//
// Invariant: consumers and producers meet at four barriers for each stage (keys and values, full and empty) and nowhere
// else; the producers follow the stream's records, the consumers a walk of their own that agrees with it. A tile that
// is wholly a unit's is finished by it; of any other each unit leaves a partial state that combine.cuh joins, with
// places as in join_block.cuh for blocks of one warp.
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
struct PrefillMap {  // shared addresses
  std::uint32_t keys, values, ring, keys_full, keys_empty, values_full, values_empty, raw_full, raw_empty;

  __device__ PrefillMap(std::uint32_t base, const PrefillRecords<Shape::kRows>& records)
      : keys(base),
        values(base + Shape::kStages * Shape::kStageBytes),
        ring(base + Shape::kRingAt),
        keys_full(shared_address(records.keys_full)),
        keys_empty(shared_address(records.keys_empty)),
        values_full(shared_address(records.values_full)),
        values_empty(shared_address(records.values_empty)),
        raw_full(shared_address(records.raw_full)),
        raw_empty(shared_address(records.raw_empty)) {}

  __device__ void init(std::uint32_t raw_slots) const {
    for (std::uint32_t s = 0; s < Shape::kStages; ++s) {
      barrier_init(keys_full + 8 * s, 4);
      barrier_init(values_full + 8 * s, 4);
      barrier_init(keys_empty + 8 * s, 4 * Shape::kConsumers);
      barrier_init(values_empty + 8 * s, 4 * Shape::kConsumers);
    }
    for (std::uint32_t s = 0; s < raw_slots; ++s) {
      barrier_init(raw_full + 8 * s, 1);
      barrier_init(raw_empty + 8 * s, 4 * Shape::kProducers);
    }
    fence_writes();
  }
};

// One warp of the producers. With two warpgroups of them, the first has the keys and the second the values.
template <typename Shape, Dtype kType>
struct Producer {
  const AttendParams& p;
  PrefillRecords<Shape::kRows>& records;
  const PrefillMap<Shape>& map;
  const std::uint32_t group, thread, lane;  // of the producers; in the group; in the warp
  Turn<Shape::kStages> turn;
  std::uint32_t pending = 0;  // dense pages just before `turn` that were asked for, but not yet told of

  __device__ bool has_keys() const { return Shape::kProducers == 1 || group == 0; }
  __device__ bool has_values() const { return Shape::kProducers == 1 || group == 1; }

  // What this thread has written of a stage's keys or values is there.
  __device__ __forceinline__ void tell(std::uint32_t full, std::uint32_t stage) const {
    fence_writes();
    __syncwarp();
    if (lane == 0) barrier_arrive(full + 8 * stage);
  }

  // Tells of dense pages until `left` of them are pending.
  template <std::uint32_t kLeft>
  __device__ __forceinline__ void settle() {
    if (pending <= kLeft) return;
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
    for (; pending > kLeft; --pending) {
      const std::uint32_t stage = (turn.stage + Shape::kStages - pending) % Shape::kStages;
      if (has_keys()) tell(map.keys_full, stage);
      if (has_values()) tell(map.values_full, stage);
    }
  }

  __device__ __forceinline__ void decode(Kind kind, std::uint32_t block) {
    const PageDecoder<Shape::kD, kType> decoder{thread / 32, lane};
    const std::uint32_t keys = map.keys + turn.stage * Shape::kStageBytes;
    const std::uint32_t values = map.values + turn.stage * Shape::kStageBytes;
    if (has_keys()) {
      barrier_wait(map.keys_empty + 8 * turn.stage, turn.parity ^ 1);
      if (kind <= Kind::k8v4) {
        decoder.keys(kind, block, keys);
      } else {
        fill_rows_with<Shape::kD>(kind == Kind::null ? 0 : 0x7fff7fffu, keys, thread);
      }
      tell(map.keys_full, turn.stage);
    }
    if (has_values()) {
      barrier_wait(map.values_empty + 8 * turn.stage, turn.parity ^ 1);
      if (kind <= Kind::k8v4) {
        decoder.values(kind, block, values);
      } else {
        fill_rows_with<Shape::kD>(0, values, thread);
      }
      tell(map.values_full, turn.stage);
    }
  }

  __device__ __forceinline__ void copy(const PageRecord& page) {
    const std::uint64_t from = page.block & ~kKindMask;
    if (has_keys()) {
      barrier_wait(map.keys_empty + 8 * turn.stage, turn.parity ^ 1);
      copy_rows<Shape::kD>(from, map.keys + turn.stage * Shape::kStageBytes, 0, kPageTokens, thread);
    }
    if (has_values()) {
      barrier_wait(map.values_empty + 8 * turn.stage, turn.parity ^ 1);
      copy_rows<Shape::kD>(from + kPageTokens * Shape::kD * 2, map.values + turn.stage * Shape::kStageBytes, page.begin,
                           page.end, thread);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    ++pending;
  }

  __device__ void run() {
    const bool leads = group == 0 && thread < 32;
    RawStream<Shape::kD, Shape::kRows> stream(p, records, map.ring, lane);
    if (leads) stream.begin();
    for (std::uint32_t slot = 0, parity = 0;;) {
      if (leads) stream.issue_next();
      barrier_wait(map.raw_full + 8 * slot, parity);
      const PageRecord page = records.page[slot];
      if (page.begin == kNoMorePages) break;
      const Kind kind = static_cast<Kind>(page.block & kKindMask);
      if (kind == Kind::dense) {
        copy(page);
        turn.next();
        settle<Shape::kLag>();
      } else {
        decode(kind, map.ring + slot * p.slot_bytes);
        settle<0>();  // those before this page
        turn.next();
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(map.raw_empty + 8 * slot);
      if (++slot == p.stages) slot = 0, parity ^= 1;
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
  Turn<Shape::kStages> key_turn, value_turn;
  RowGroup<Shape::kD, kType, kPlain> rows;

  __device__ __forceinline__ void ask_scores(float (&s)[32]) {
    barrier_wait(map.keys_full + 8 * key_turn.stage, key_turn.parity);
    rows.ask_scores(map.keys + key_turn.stage * Shape::kStageBytes, s);
  }
  __device__ __forceinline__ void ask_values(const std::uint32_t (&weight)[4][4]) {
    barrier_wait(map.values_full + 8 * value_turn.stage, value_turn.parity);
    rows.ask_values(map.values + value_turn.stage * Shape::kStageBytes, weight);
  }
  __device__ __forceinline__ void leave(std::uint32_t empty, Turn<Shape::kStages>& turn) {
    if (lane == 0) barrier_arrive(empty + 8 * turn.stage);
    turn.next();
  }

  // The scores of a page are on their way while the values of the page before are.
  __device__ __forceinline__ void pages(std::uint32_t begin, std::uint32_t end) {
    if (begin >= end) return;
    float s[32];
    std::uint32_t weight[4][4];
    ask_scores(s);
    products_wait<0>();
    hold(s);
    leave(map.keys_empty, key_turn);
    rows.weigh(p, static_cast<std::int32_t>(begin * kPageTokens), lane, s);
    rows.pack(s, weight);
#pragma unroll 1
    for (std::uint32_t page = begin + 1; page < end; ++page) {
      ask_scores(s);
      ask_values(weight);
      products_wait<1>();
      hold(s);
      leave(map.keys_empty, key_turn);
      rows.weigh(p, static_cast<std::int32_t>(page * kPageTokens), lane, s);
      products_wait<0>();
      hold(rows.out);
      leave(map.values_empty, value_turn);
      rows.pack(s, weight);
    }
    ask_values(weight);
    products_wait<0>();
    hold(rows.out);
    leave(map.values_empty, value_turn);
  }

  __device__ void run(PrefillRecords<Shape::kRows>& records, const Shares& shares) {
    const std::uint32_t unit = blockIdx.x, row = group * kGroupRows + thread / 32 * 16 + lane / 4;
    const bool leads = group == 0 && thread == 0;
    constexpr std::uint32_t kFloats = partial_floats(Shape::kRows, Shape::kD);
    if (leads) p.tails[unit] = {0, kNoUnit, 0, 0, 0, 0};
    TilePiece piece;
    while (next_piece(p, records.walk[group * 4 + thread / 32], piece)) {
      rows.begin(p, piece, piece.tile * Shape::kRows + group * kGroupRows, thread);
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
__global__ void __launch_bounds__(kPrefillThreads, 1) prefill_kernel(const __grid_constant__ AttendParams p) {
#if KVQ_WARPGROUPS
  using Shape = PrefillShape<kD, kConsumers>;
  extern __shared__ __align__(1024) std::byte shared[];
  auto& records = *reinterpret_cast<PrefillRecords<Shape::kRows>*>(shared);
  static_assert(sizeof(records) <= kRecordBytes);
  const PrefillMap<Shape> map(shared_address(shared) + kRecordBytes, records);
  const std::uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.x / kGroupThreads;
  if (threadIdx.x == 0) map.init(p.stages);
  asm volatile("griddepcontrol.wait;" ::: "memory");  // what comes before may still be writing what is read here
  asm volatile("griddepcontrol.launch_dependents;");
  TileCosts<Shape::kRows> costs{p.group, false};
  const Shares shares = costs.shares(p, gridDim.x, lane);
  if (warp <= 4 * kConsumers) {  // the consumers' walks and, by the leading producer, the stream's
    const std::uint64_t begin = shares.unit_begin(blockIdx.x), end = shares.unit_begin(blockIdx.x + 1);
    TileWalk<Shape::kRows> walk;
    walk.begin(p, costs, begin, end - begin, lane);
    if (lane == 0) records.walk[warp == 4 * kConsumers ? 8 : warp] = walk;
  }
  __syncthreads();
  if (group < kConsumers) {
    take_registers<Shape::kConsumerRegisters, true>();
    Consumer<Shape, kType, kPlain> consumer{p, map, group, threadIdx.x % kGroupThreads, lane};
    consumer.run(records, shares);
  } else {
    take_registers<Shape::kProducerRegisters, false>();
    Producer<Shape, kType> producer{p, records, map, group - kConsumers, threadIdx.x % kGroupThreads, lane};
    producer.run();
  }
#endif
}

}  // namespace kvq::cuda
