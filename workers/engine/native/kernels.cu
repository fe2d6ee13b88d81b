// Kernels behind the operators of operators.c. Compiled at start for the device at hand, without any header, for
// float16 or, with BFLOAT16 defined, for bfloat16. All arithmetic is in float32, rounded once at the end.

typedef unsigned short Element;  // the bits of a float16 or bfloat16
typedef long long Index;

#ifdef BFLOAT16
__device__ __forceinline__ float widen(Element bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
__device__ __forceinline__ Element narrow(float value) {
  Element bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#else
__device__ __forceinline__ float widen(Element bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ Element narrow(float value) {
  Element bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

// A few elements that are moved at once.
template <int COUNT>
struct alignas(2 * COUNT) Some {
  Element at[COUNT];
};
using Eight = Some<8>;

// A block, or four, for each token: its queries turned into `query`, its keys turned and its values as they are into the
// cache. The last dimension of qkv holds the queries of all heads, then the keys, then the values. The i-th channel of a
// head's first half is turned with the i-th of its second half, COUNT at once.
template <int COUNT>
__device__ __forceinline__ void rotate_append_by(Element* __restrict__ query, const Element* __restrict__ qkv,
                                                 const Index* __restrict__ positions, const int* __restrict__ slots,
                                                 const Element* __restrict__ cosines,
                                                 const Element* __restrict__ sines, Element* __restrict__ key_cache,
                                                 Element* __restrict__ value_cache, int heads, int kv_heads, int dim) {
  using Part = Some<COUNT>;
  const Index token = blockIdx.x;
  const int half = dim / 2, parts = half / COUNT;
  const int slot = slots[token];
  const Element* from = qkv + token * (heads + 2 * kv_heads) * dim;
  const Element* cosine = cosines + positions[token] * half;
  const Element* sine = sines + positions[token] * half;
  const Index cached = static_cast<Index>(slot) * kv_heads * dim;
  const int turned = (heads + (slot < 0 ? 0 : kv_heads)) * parts;
  const int begin = blockIdx.y * blockDim.x + threadIdx.x, stride = gridDim.y * blockDim.x;
#pragma unroll 2
  for (int i = begin; i < turned; i += stride) {
    const int head = i / parts, at = (i - head * parts) * COUNT;
    const Element* source = from + head * dim + at;
    const Part first = *reinterpret_cast<const Part*>(source), second = *reinterpret_cast<const Part*>(source + half);
    const Part c = *reinterpret_cast<const Part*>(cosine + at), s = *reinterpret_cast<const Part*>(sine + at);
    Part first_out, second_out;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      const float x = widen(first.at[j]), y = widen(second.at[j]);
      first_out.at[j] = narrow(x * widen(c.at[j]) - y * widen(s.at[j]));
      second_out.at[j] = narrow(y * widen(c.at[j]) + x * widen(s.at[j]));
    }
    Element* target = head < heads ? query + (token * heads + head) * dim + at
                                   : key_cache + cached + (head - heads) * dim + at;
    *reinterpret_cast<Part*>(target) = first_out;
    *reinterpret_cast<Part*>(target + half) = second_out;
  }
  if (slot < 0) return;
  const Eight* values = reinterpret_cast<const Eight*>(from + (heads + kv_heads) * dim);
  Eight* stored = reinterpret_cast<Eight*>(value_cache + cached);
#pragma unroll 2
  for (int i = begin; i < kv_heads * dim / 8; i += stride) stored[i] = values[i];
}

extern "C" __global__ void rotate_append(Element* query, const Element* qkv, const Index* positions, const int* slots,
                                         const Element* cosines, const Element* sines, Element* key_cache,
                                         Element* value_cache, int heads, int kv_heads, int dim) {
  if (dim % 16) {
    rotate_append_by<4>(query, qkv, positions, slots, cosines, sines, key_cache, value_cache, heads, kv_heads, dim);
  } else {
    rotate_append_by<8>(query, qkv, positions, slots, cosines, sines, key_cache, value_cache, heads, kv_heads, dim);
  }
}

__device__ __forceinline__ Element gate_one(Element gate, Element up) {
  const float x = widen(gate);
  return narrow(x / (1.0f + __expf(-x)) * widen(up));
}

// silu(gate) * up, element by element.
extern "C" __global__ void gated_product(Element* __restrict__ output, const Element* __restrict__ gate,
                                         const Element* __restrict__ up, Index count) {
  const Index first = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
  const Index stride = static_cast<Index>(gridDim.x) * blockDim.x;
  for (Index i = first; i < count / 8; i += stride) {
    const Eight g = reinterpret_cast<const Eight*>(gate)[i], u = reinterpret_cast<const Eight*>(up)[i];
    Eight result;
#pragma unroll
    for (int j = 0; j < 8; j++) result.at[j] = gate_one(g.at[j], u.at[j]);
    reinterpret_cast<Eight*>(output)[i] = result;
  }
  const Index rest = count / 8 * 8 + first;
  if (rest < count) output[rest] = gate_one(gate[rest], up[rest]);
}

__device__ __forceinline__ float power_of_two(float exponent) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
  return value;
}

// Eight elements that are read once and not again.
__device__ __forceinline__ Eight stream(const Element* from) {
  uint4 bits;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from));
  return *reinterpret_cast<const Eight*>(&bits);
}

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;  // of logits; finite, so that differences of two are numbers

// Softmax of each row of scores, and the logarithm of the sum of the row's exponentials. A block for each row.
extern "C" __global__ void softmax_weight(Element* __restrict__ shares, float* __restrict__ weights,
                                          const Element* __restrict__ scores, int columns) {
  __shared__ float of_warps[2][8];
  const Eight* row = reinterpret_cast<const Eight*>(scores + static_cast<Index>(blockIdx.x) * columns);
  Eight* out = reinterpret_cast<Eight*>(shares + static_cast<Index>(blockIdx.x) * columns);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float most = LOWEST, sum = 0.0f;
  for (int i = threadIdx.x; i < columns / 8; i += blockDim.x) {
    const Eight values = row[i];
    float largest = most;
#pragma unroll
    for (int j = 0; j < 8; j++) largest = fmaxf(largest, widen(values.at[j]));
    sum *= power_of_two((most - largest) * LOG2_E);
    most = largest;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += power_of_two((widen(values.at[j]) - most) * LOG2_E);
  }
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, most, distance);
    const float others = __shfl_xor_sync(0xffffffffu, sum, distance);
    const float largest = fmaxf(most, other);
    sum = sum * power_of_two((most - largest) * LOG2_E) + others * power_of_two((other - largest) * LOG2_E);
    most = largest;
  }
  if (threadIdx.x % 32 == 0) of_warps[0][warp] = most, of_warps[1][warp] = sum;
  __syncthreads();
  most = LOWEST, sum = 0.0f;
  for (int i = 0; i < warps; i++) most = fmaxf(most, of_warps[0][i]);
  for (int i = 0; i < warps; i++) sum += of_warps[1][i] * power_of_two((of_warps[0][i] - most) * LOG2_E);
  const float scale = 1.0f / sum;
  for (int i = threadIdx.x; i < columns / 8; i += blockDim.x) {
    const Eight values = row[i];
    Eight result;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      result.at[j] = narrow(power_of_two((widen(values.at[j]) - most) * LOG2_E) * scale);
    }
    out[i] = result;
  }
  if (threadIdx.x == 0) weights[blockIdx.x] = most + __logf(sum);
}

// Attention of one token a row to its row's context in the paged cache, the token itself included. A block for each row
// and KV head, with GROUP query heads. A token's channels are spread over LANES lanes, each with eight of either half, so
// a warp reads 32 / LANES tokens at once; every such set of lanes keeps a softmax of its own as it goes, and all are
// joined at the end. With a prefix, what was attended to elsewhere takes part as one token: its answer, and its weight as
// the logarithm of its sum of exponentials, [kv_heads, rows * GROUP(, DIM)].
// With several blocks in z, each attends to one segment of the context, and what it found goes to `partial`, for
// `attend_join`: [rows, kv_heads, segments, GROUP, DIM + 2], the answer, its largest score and its sum.
template <int LANES, int GROUP>
__device__ __forceinline__ void attend_row(Element* __restrict__ output, const Element* __restrict__ query,
                                           const Element* __restrict__ key_cache,
                                           const Element* __restrict__ value_cache,
                                           const int* __restrict__ block_table, const int* __restrict__ past_lengths,
                                           const Element* __restrict__ prefix_answer,
                                           const float* __restrict__ prefix_weight, float* __restrict__ partial,
                                           int table_width, int block_size, int segment, float scale) {
  constexpr int DIM = LANES * 16, AT_ONCE = 32 / LANES, UNROLL = GROUP == 1 ? 4 : 2, WARPS = 4;
  constexpr int CHUNK = AT_ONCE * UNROLL;
  const int kv_head = blockIdx.x, kv_heads = gridDim.x;
  const Index row = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % LANES, which = lane / LANES;
  const int start = blockIdx.z * segment, length = min(past_lengths[row] + 1, start + segment);
  if (start >= length) return;
  const Index stride = static_cast<Index>(kv_heads) * DIM;  // from one token to the next
  const int* table = block_table + row * table_width;

  float q[GROUP][16], answer[GROUP][16], most[GROUP], sum[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    const Element* from = query + (row * kv_heads + kv_head) * GROUP * DIM + g * DIM + part * 8;
    const Eight first = *reinterpret_cast<const Eight*>(from);
    const Eight second = *reinterpret_cast<const Eight*>(from + DIM / 2);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      q[g][i] = widen(first.at[i]) * (scale * LOG2_E);
      q[g][8 + i] = widen(second.at[i]) * (scale * LOG2_E);
    }
    most[g] = LOWEST, sum[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) answer[g][i] = 0.0f;
  }
  if (prefix_answer && start == 0 && warp == 0 && which == 0) {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      const Index at = (kv_head * static_cast<Index>(gridDim.y) + row) * GROUP + g;
      const Eight first = *reinterpret_cast<const Eight*>(prefix_answer + at * DIM + part * 8);
      const Eight second = *reinterpret_cast<const Eight*>(prefix_answer + at * DIM + DIM / 2 + part * 8);
      most[g] = prefix_weight[at] * LOG2_E, sum[g] = 1.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) answer[g][i] = widen(first.at[i]), answer[g][8 + i] = widen(second.at[i]);
    }
  }

  for (int begin = start + warp * CHUNK; begin < length; begin += WARPS * CHUNK) {
    // A chunk lies within one block, whose size is a multiple of it.
    const Index slot = static_cast<Index>(table[begin / block_size]) * block_size + begin % block_size + which;
    const Index offset = slot * stride + kv_head * DIM + part * 8;
    Eight keys[UNROLL][2], values[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const Index at = offset + u * AT_ONCE * stride;
      if (begin + u * AT_ONCE + which < length) {
        keys[u][0] = stream(key_cache + at), keys[u][1] = stream(key_cache + at + DIM / 2);
        values[u][0] = stream(value_cache + at), values[u][1] = stream(value_cache + at + DIM / 2);
      } else {
        keys[u][0] = keys[u][1] = values[u][0] = values[u][1] = Eight{};
      }
    }
    float scores[UNROLL][GROUP];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
          score += q[g][i] * widen(keys[u][0].at[i]);
          score += q[g][8 + i] * widen(keys[u][1].at[i]);
        }
#pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2) {
          score += __shfl_xor_sync(0xffffffffu, score, distance);
        }
        scores[u][g] = score;
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float largest = most[g];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        if (begin + u * AT_ONCE + which < length) largest = fmaxf(largest, scores[u][g]);
      }
      const float kept = power_of_two(most[g] - largest);
      most[g] = largest, sum[g] *= kept;
#pragma unroll
      for (int i = 0; i < 16; i++) answer[g][i] *= kept;
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const bool is_there = begin + u * AT_ONCE + which < length;
        const float share = is_there ? power_of_two(scores[u][g] - largest) : 0.0f;
        sum[g] += share;
#pragma unroll
        for (int i = 0; i < 8; i++) {
          answer[g][i] += share * widen(values[u][0].at[i]);
          answer[g][8 + i] += share * widen(values[u][1].at[i]);
        }
      }
    }
  }

  __shared__ float answers[WARPS][GROUP][DIM], mosts[WARPS][GROUP], sums[WARPS][GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
#pragma unroll
    for (int distance = LANES; distance < 32; distance *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, most[g], distance);
      const float largest = fmaxf(most[g], other);
      const float mine = power_of_two(most[g] - largest), theirs = power_of_two(other - largest);
      sum[g] = sum[g] * mine + __shfl_xor_sync(0xffffffffu, sum[g], distance) * theirs;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        answer[g][i] = answer[g][i] * mine + __shfl_xor_sync(0xffffffffu, answer[g][i], distance) * theirs;
      }
      most[g] = largest;
    }
    if (which == 0) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        answers[warp][g][part * 8 + i] = answer[g][i];
        answers[warp][g][DIM / 2 + part * 8 + i] = answer[g][8 + i];
      }
      if (part == 0) mosts[warp][g] = most[g], sums[warp][g] = sum[g];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * DIM; i += blockDim.x) {
    const int g = i / DIM;
    float largest = LOWEST, total = 0.0f, result = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, mosts[w][g]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float share = power_of_two(mosts[w][g] - largest);
      total += sums[w][g] * share;
      result += answers[w][g][i % DIM] * share;
    }
    const Index head = row * kv_heads + kv_head;
    if (gridDim.z == 1) {
      output[head * GROUP * DIM + i] = narrow(result / total);
    } else {
      float* found = partial + ((head * gridDim.z + blockIdx.z) * GROUP + g) * (DIM + 2);
      found[i % DIM] = result;
      if (i % DIM == 0) found[DIM] = largest, found[DIM + 1] = total;
    }
  }
}

#ifdef ATTEND_DIM  // compiled for the heads of the model at hand
extern "C" __global__ void __launch_bounds__(128)
    attend(Element* output, const Element* query, const Element* key_cache, const Element* value_cache,
           const int* block_table, const int* past_lengths, const Element* prefix_answer, const float* prefix_weight,
           float* partial, int table_width, int block_size, int segment, float scale) {
  attend_row<ATTEND_DIM / 16, ATTEND_GROUP>(output, query, key_cache, value_cache, block_table, past_lengths,
                                            prefix_answer, prefix_weight, partial, table_width, block_size, segment,
                                            scale);
}

// The answer of each row and head from those of its segments. A block for each row and KV head.
extern "C" __global__ void attend_join(Element* __restrict__ output, const float* __restrict__ partial,
                                       const int* __restrict__ past_lengths, int segment, int segments) {
  constexpr int DIM = ATTEND_DIM, GROUP = ATTEND_GROUP;
  const Index head = static_cast<Index>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int used = past_lengths[blockIdx.y] / segment + 1;
  for (int i = threadIdx.x; i < GROUP * DIM; i += blockDim.x) {
    const float* found = partial + (head * segments * GROUP + i / DIM) * (DIM + 2);
    float largest = LOWEST, total = 0.0f, result = 0.0f;
    for (int n = 0; n < used; n++) largest = fmaxf(largest, found[n * GROUP * (DIM + 2) + DIM]);
    for (int n = 0; n < used; n++) {
      const float* one = found + n * GROUP * (DIM + 2);
      const float share = power_of_two(one[DIM] - largest);
      total += one[DIM + 1] * share;
      result += one[i % DIM] * share;
    }
    output[head * GROUP * DIM + i] = narrow(result / total);
  }
}
#endif

// The first positions of some blocks of the cache into others, in every plane of it (a layer's keys, or its values).
// copies: source, target, and how many times 16 bytes, for each.
extern "C" __global__ void copy_positions(uint4* cache, const int* __restrict__ copies, Index plane_size,
                                          Index block_size) {
  const int* copy = copies + 3 * blockIdx.x;
  uint4* plane = cache + blockIdx.y * plane_size;
  const uint4* source = plane + copy[0] * block_size;
  uint4* target = plane + copy[1] * block_size;
  for (int i = blockIdx.z * blockDim.x + threadIdx.x; i < copy[2]; i += gridDim.z * blockDim.x) target[i] = source[i];
}

struct Best {
  float value;
  int column;
};

__device__ __forceinline__ Best better(Best one, Best other) {
  const bool wins = other.value > one.value || (other.value == one.value && other.column < one.column);
  return wins ? other : one;
}

__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    Best other;
    other.value = __shfl_down_sync(0xffffffffu, best.value, distance);
    other.column = __shfl_down_sync(0xffffffffu, best.column, distance);
    best = better(best, other);
  }
  return best;
}

// A block for each row: the first of its largest elements.
extern "C" __global__ void row_argmax(Index* __restrict__ output, const Element* __restrict__ logits, int columns) {
  const Element* row = logits + static_cast<Index>(blockIdx.x) * columns;
  Best best = {__int_as_float(0xff800000), 0};  // minus infinity
  const int wide = columns % 8 ? 0 : columns / 8;  // rows begin at whole multiples of 16 bytes only then
  for (int i = threadIdx.x; i < wide; i += blockDim.x) {
    const Eight values = reinterpret_cast<const Eight*>(row)[i];
#pragma unroll
    for (int j = 0; j < 8; j++) best = better(best, Best{widen(values.at[j]), i * 8 + j});
  }
  for (int i = wide * 8 + threadIdx.x; i < columns; i += blockDim.x) best = better(best, Best{widen(row[i]), i});
  __shared__ Best of_warps[32];
  best = best_of_warp(best);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : Best{__int_as_float(0xff800000), 0x7fffffff};
  best = best_of_warp(best);
  if (threadIdx.x == 0) output[blockIdx.x] = best.column < columns ? best.column : 0;
}
