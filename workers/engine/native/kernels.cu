// Kernels behind the operators of operators.c. Compiled at start for the device at hand, without any header, for
// float16 or, with BFLOAT16 defined, for bfloat16. All sums are in float32, and results rounded once at the end; so are the
// shares of attention, which the tensor cores take in two bytes.

typedef unsigned short Element;  // the bits of a float16 or bfloat16
typedef long long Index;

#ifndef PRETENDED_DEVICE  // tests on a machine without a GPU bring these for themselves

#ifdef BFLOAT16
#define TYPE "bf16"
__device__ __forceinline__ float widen(Element bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
__device__ __forceinline__ Element narrow(float value) {
  Element bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#else
#define TYPE "f16"
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

// Two elements in one register, the first in its lower half.
__device__ __forceinline__ unsigned narrow_two(float first, float second) {
  unsigned bits;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

__device__ __forceinline__ float power_of_two(float exponent) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
  return value;
}

__device__ __forceinline__ unsigned shared_address(const void* memory) {
  return static_cast<unsigned>(__cvta_generic_to_shared(memory));
}

// 16 bytes to shared memory, later; zeros where there is nothing to copy.
__device__ __forceinline__ void copy_later(unsigned address, const Element* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(is_there ? 16 : 0));
}
// What was said to be copied since the last mark is one group.
__device__ __forceinline__ void mark_copies() { asm volatile("cp.async.commit_group;"); }
// Until all groups have come but the last `COUNT`.
template <int COUNT>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT));
}

// Four 8 x 8 matrices from shared memory, whose rows lie where the lanes say, eight lanes for each; as they are or turned.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
__device__ __forceinline__ void load_turned_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

// Of an 8 x 8 matrix that lies in a warp as two elements a lane, row by row: the one with rows and columns changed.
__device__ __forceinline__ unsigned turn(unsigned bits) {
  unsigned turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(bits));
  return turned;
}

// One product of the tensor cores: sum [16, 8] += left [16, 16] * right [16, 8], spread over a warp as the PTX manual says
// (mma.m16n8k16): sum[0], sum[1] are of row lane / 4 and columns lane % 4 * 2 and the next, sum[2], sum[3] eight rows below.
__device__ __forceinline__ void multiply(float (&sum)[4], unsigned left0, unsigned left1, unsigned left2, unsigned left3,
                                         unsigned right0, unsigned right1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left0), "r"(left1), "r"(left2), "r"(left3), "r"(right0), "r"(right1));
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

// silu(gate) * up, element by element; a token's gates lie before its ups. A block, or four, for each token.
extern "C" __global__ void gated_product(Element* __restrict__ output, const Element* __restrict__ both, int columns) {
  const Element* gate = both + static_cast<Index>(blockIdx.x) * 2 * columns;
  const Element* up = gate + columns;
  Element* out = output + static_cast<Index>(blockIdx.x) * columns;
  const int first = blockIdx.y * blockDim.x + threadIdx.x, stride = gridDim.y * blockDim.x;
  const int wide = columns % 8 ? 0 : columns / 8;  // rows begin at whole multiples of 16 bytes only then
#pragma unroll 2
  for (int i = first; i < wide; i += stride) {
    const Eight g = reinterpret_cast<const Eight*>(gate)[i], u = reinterpret_cast<const Eight*>(up)[i];
    Eight result;
#pragma unroll
    for (int j = 0; j < 8; j++) result.at[j] = gate_one(g.at[j], u.at[j]);
    reinterpret_cast<Eight*>(out)[i] = result;
  }
  for (int i = wide * 8 + first; i < columns; i += stride) out[i] = gate_one(gate[i], up[i]);
}

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;  // of logits; finite, so that differences of two are numbers

#ifdef ATTEND_DIM  // compiled for the heads of the model at hand

constexpr int DIM = ATTEND_DIM, GROUP = ATTEND_GROUP;  // channels of a head, and query heads to a KV head
constexpr int CHUNKS = DIM / 8;                        // of 16 bytes, of a token

// Keys and values come through shared memory. There a token's chunks change places by its number, so that eight tokens'
// equal chunks lie in different banks. Where one of them lies, in bytes:
__device__ __forceinline__ int place(int token, int chunk) { return token * DIM * 2 + (chunk ^ token % 8) * 16; }

// Attention of one token a row to its row's context in the paged cache, the token itself included. A block for each KV head
// and row, with the query heads that share it; block sizes are multiples of TOKENS. A warp takes TOKENS at a time, and has
// the next ones on their way meanwhile. It multiplies [tokens, channels] by [channels, heads], of eight heads those beyond
// GROUP zero, keeps a softmax of its own as it goes, and adds up [channels, tokens] by [tokens, heads].
// Of a prefix that `attend_shared` has attended to, each part takes part as one token: its answer, [parts, kv_heads,
// rows * GROUP, DIM], and its weight as the logarithm of its sum of exponentials, [parts, kv_heads, rows * GROUP].
// With several blocks in z, each attends to one segment of the context, and what it found goes to `partial`, for
// `attend_join`: [rows, kv_heads, segments, GROUP, DIM + 2], the answer, its largest score and its sum.
extern "C" __global__ void __launch_bounds__(128)
    attend(Element* __restrict__ output, const Element* __restrict__ query, const Element* __restrict__ key_cache,
           const Element* __restrict__ value_cache, const int* __restrict__ block_table,
           const int* __restrict__ past_lengths, const Element* __restrict__ prefix_answer,
           const float* __restrict__ prefix_weight, float* __restrict__ partial, int table_width, int block_size,
           int segment, int prefix_parts, float scale) {
  constexpr int WARPS = 4, TOKENS = 16, STEP = WARPS * TOKENS, TILE_BYTES = TOKENS * DIM * 2;
  extern __shared__ __align__(128) unsigned char memory[];  // of each warp: keys and values, and those that come next
  const int kv_head = blockIdx.x, kv_heads = gridDim.x;
  const Index row = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane % 4, eighth = lane / 4;
  const int start = blockIdx.z * segment, length = min(past_lengths[row] + 1, start + segment);
  if (start >= length) return;
  const int* table = block_table + row * table_width;
  const Index stride = static_cast<Index>(kv_heads) * DIM;  // from one token to the next
  const unsigned shared = shared_address(memory) + warp * 4 * TILE_BYTES;

  auto load = [&](int begin, unsigned to) {
    if (begin < length) {
      const Index slot = static_cast<Index>(table[begin / block_size]) * block_size + begin % block_size;
      const Index offset = slot * stride + kv_head * DIM;
#pragma unroll
      for (int n = 0; n < TOKENS * CHUNKS / 32; n++) {
        const int token = (n * 32 + lane) / CHUNKS, chunk = (n * 32 + lane) % CHUNKS;
        const Index from = offset + token * stride + chunk * 8;
        copy_later(to + place(token, chunk), key_cache + from, begin + token < length);
        copy_later(to + TILE_BYTES + place(token, chunk), value_cache + from, begin + token < length);
      }
    }
    mark_copies();
  };
  const int first = start + warp * TOKENS;
  load(first, shared);
  load(first + STEP, shared + 2 * TILE_BYTES);

  // This lane's heads: `eighth` of the queries, 2 * pair and the next of scores and answers.
  unsigned q[DIM / 16][2];
#pragma unroll
  for (int k = 0; k < DIM / 16; k++) {
    const Element* from = query + ((row * kv_heads + kv_head) * GROUP + eighth) * DIM + k * 16 + pair * 2;
    q[k][0] = eighth < GROUP ? *reinterpret_cast<const unsigned*>(from) : 0;
    q[k][1] = eighth < GROUP ? *reinterpret_cast<const unsigned*>(from + 8) : 0;
  }
  float answer[DIM / 16][4] = {}, most[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f};
  const int parts = start == 0 && warp == 0 ? prefix_parts : 0;
  for (int part = 0; part < parts; part++) {
#pragma unroll
    for (int g = 0; g < 2; g++) {
      if (2 * pair + g >= GROUP) continue;
      const Index at = ((static_cast<Index>(part) * kv_heads + kv_head) * gridDim.y + row) * GROUP + 2 * pair + g;
      const float weight = prefix_weight[at] * LOG2_E, largest = fmaxf(most[g], weight);
      const float kept = power_of_two(most[g] - largest), share = power_of_two(weight - largest);
      most[g] = largest, sum[g] = sum[g] * kept + (eighth == 0 ? share : 0.0f);  // sums are of each lane until the end
#pragma unroll
      for (int n = 0; n < DIM / 16; n++) {
        const Element* from = prefix_answer + at * DIM + n * 16 + eighth;
        answer[n][g] = answer[n][g] * kept + share * widen(from[0]);
        answer[n][2 + g] = answer[n][2 + g] * kept + share * widen(from[8]);
      }
    }
  }
  scale *= LOG2_E;

  int stage = 0;
  for (int begin = first; begin < length; begin += STEP, stage ^= 1) {
    await_copies<1>();
    __syncwarp();
    const unsigned keys = shared + stage * 2 * TILE_BYTES, values = keys + TILE_BYTES;
    float scores[4] = {}, others[4] = {};  // of half of the channels each: two products at a time
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
      unsigned left[4];
      load_matrices(left, keys + place(lane % 16, k * 2 + lane / 16));
      multiply(k % 2 ? others : scores, left[0], left[1], left[2], left[3], q[k][0], q[k][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      scores[i] = begin + eighth + i / 2 * 8 < length ? (scores[i] + others[i]) * scale : LOWEST;
    }
    float kept[2];
#pragma unroll
    for (int g = 0; g < 2; g++) {
      float largest = fmaxf(scores[g], scores[2 + g]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      }
      largest = fmaxf(largest, most[g]);
      kept[g] = power_of_two(most[g] - largest);
      most[g] = largest;
      scores[g] = power_of_two(scores[g] - largest), scores[2 + g] = power_of_two(scores[2 + g] - largest);
      sum[g] = sum[g] * kept[g] + scores[g] + scores[2 + g];
    }
    const unsigned early = turn(narrow_two(scores[0], scores[1])), late = turn(narrow_two(scores[2], scores[3]));
#pragma unroll
    for (int n = 0; n < DIM / 16; n++) {
      unsigned left[4];
      load_turned_matrices(left, values + place(lane / 16 * 8 + lane % 8, n * 2 + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; i++) answer[n][i] *= kept[i % 2];
      multiply(answer[n], left[0], left[1], left[2], left[3], early, late);
    }
    __syncwarp();
    load(begin + 2 * STEP, keys);
  }

  // The warps' answers, each with its largest score and its sum, become one.
  __syncthreads();
  float* const answers = reinterpret_cast<float*>(memory);  // [WARPS, GROUP, DIM]
  float* const mosts = answers + WARPS * GROUP * DIM;       // [WARPS, GROUP]
  float* const sums = mosts + WARPS * GROUP;
#pragma unroll
  for (int g = 0; g < 2; g++) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) sum[g] += __shfl_xor_sync(0xffffffffu, sum[g], distance);
    const int at = warp * GROUP + 2 * pair + g;
    if (2 * pair + g >= GROUP) continue;
    if (eighth == 0) mosts[at] = most[g], sums[at] = sum[g];
#pragma unroll
    for (int n = 0; n < DIM / 16; n++) {
      answers[at * DIM + n * 16 + eighth] = answer[n][g];
      answers[at * DIM + n * 16 + 8 + eighth] = answer[n][2 + g];
    }
  }
  __syncthreads();
  const Index head = row * kv_heads + kv_head;
  for (int i = threadIdx.x; i < GROUP * DIM; i += blockDim.x) {
    const int g = i / DIM;
    float largest = LOWEST, total = 0.0f, result = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, mosts[w * GROUP + g]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float share = power_of_two(mosts[w * GROUP + g] - largest);
      total += sums[w * GROUP + g] * share;
      result += answers[w * GROUP * DIM + i] * share;
    }
    if (gridDim.z == 1) {
      output[head * GROUP * DIM + i] = narrow(result / total);
    } else {
      float* found = partial + ((head * gridDim.z + blockIdx.z) * GROUP + g) * (DIM + 2);
      found[i % DIM] = result;
      if (i % DIM == 0) found[DIM] = largest, found[DIM + 1] = total;
    }
  }
}

// The answer of each row and head from those of its segments. A block for each row and KV head.
extern "C" __global__ void attend_join(Element* __restrict__ output, const float* __restrict__ partial,
                                       const int* __restrict__ past_lengths, int segment, int segments) {
  const Index head = static_cast<Index>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int used = past_lengths[blockIdx.y] / segment + 1;
  for (int i = threadIdx.x; i < GROUP * DIM; i += blockDim.x) {
    const float* found = partial + (head * segments * GROUP + i / DIM) * (DIM + 2);
    float largest = LOWEST, total = 0.0f, result = 0.0f;
#pragma unroll 8
    for (int n = 0; n < used; n++) largest = fmaxf(largest, found[n * GROUP * (DIM + 2) + DIM]);
#pragma unroll 8
    for (int n = 0; n < used; n++) {
      const float* one = found + n * GROUP * (DIM + 2);
      const float share = power_of_two(one[DIM] - largest);
      total += one[DIM + 1] * share;
      result += one[i % DIM] * share;
    }
    output[head * GROUP * DIM + i] = narrow(result / total);
  }
}

constexpr int TILE_THREADS = 256, TILE_QUERIES = TILE_THREADS / 2, TILE_TOKENS = TILE_QUERIES / GROUP, TILE_KEYS = 64;

// Attention of a tile of tokens of neighbouring places, from `first` on, to the keys from `begin` to before `end` of one
// table, by a block that is one KV head's. Its queries are the tokens' query heads that share the KV head, one token's
// behind the other's; a warp takes 16. With IS_CAUSAL the first token is at `position`, and none attends to what comes
// after it. Block sizes, and `begin`, are multiples of TILE_KEYS, and so is `end` if not causal. Keys and values come one
// tile ahead; the softmax is kept as it goes (as in FlashAttention, Dao et al. 2022).
// place_of(query): where the query's answer goes; weights: if any, where the logarithm of each sum of exponentials goes.
template <bool IS_CAUSAL, typename PlaceOf>
__device__ __forceinline__ void attend_tile(const Element* query, const Element* key_cache, const Element* value_cache,
                                            const int* table, int block_size, float scale, int kv_head, int kv_heads,
                                            Index first, int tokens, int position, int begin, int end,
                                            PlaceOf place_of, float* weights) {
  constexpr int KEYS = TILE_KEYS, TILE_BYTES = KEYS * DIM * 2;
  extern __shared__ __align__(128) unsigned char memory[];  // keys, values, then those of the next tile
  const unsigned shared = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane % 4, eighth = lane / 4;
  const int queries = tokens * GROUP;
  const Index stride = static_cast<Index>(kv_heads) * DIM;

  auto load = [&](int key, int stage) {
    const Index slot = static_cast<Index>(table[key / block_size]) * block_size + key % block_size;
    const Index offset = slot * stride + kv_head * DIM;
    const unsigned to = shared + stage * 2 * TILE_BYTES;
#pragma unroll
    for (int n = 0; n < KEYS * CHUNKS / TILE_THREADS; n++) {
      const int i = n * TILE_THREADS + threadIdx.x, token = i / CHUNKS, chunk = i % CHUNKS;
      const Index from = offset + token * stride + chunk * 8;
      copy_later(to + place(token, chunk), key_cache + from, key + token < end);
      copy_later(to + TILE_BYTES + place(token, chunk), value_cache + from, key + token < end);
    }
    mark_copies();
  };
  load(begin, 0);

  // This lane's rows of its warp's are eighth and eighth + 8.
  const int mine = warp * 16 + eighth;
  unsigned q[DIM / 16][4];
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int at = mine + n % 2 * 8;
    const Index channels = (((first + at / GROUP) * kv_heads + kv_head) * GROUP + at % GROUP) * DIM;
    const Element* from = query + channels + n / 2 * 8 + pair * 2;
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) q[k][n] = at < queries ? *reinterpret_cast<const unsigned*>(from + k * 16) : 0;
  }
  float answer[DIM / 8][4] = {}, most[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f};
  scale *= LOG2_E;

  // The last key that this warp attends to.
  const int last = IS_CAUSAL ? min(position + (warp * 16 + 15) / GROUP, end - 1) : end - 1;
  int stage = 0;
  for (int key = begin; key < end; key += KEYS, stage ^= 1) {
    await_copies<0>();
    __syncthreads();  // this tile is there, and nobody reads the one before it any more
    if (key + KEYS < end) load(key + KEYS, stage ^ 1);
    if (warp * 16 >= queries || key > last) continue;
    const unsigned from_keys = shared + stage * 2 * TILE_BYTES, from_values = from_keys + TILE_BYTES;

    float scores[KEYS / 8][4] = {};
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        unsigned right[4];
        load_matrices(right, from_keys + place(n * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
        multiply(scores[2 * n], q[k][0], q[k][1], q[k][2], q[k][3], right[0], right[1]);
        multiply(scores[2 * n + 1], q[k][0], q[k][1], q[k][2], q[k][3], right[2], right[3]);
      }
    }
    if (IS_CAUSAL && key + KEYS - 1 > position + warp * 16 / GROUP) {  // some keys come after some of the queries
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = position + (mine + i / 2 * 8) / GROUP;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
          if (key + n * 8 + pair * 2 + i % 2 > at) scores[n][i] = LOWEST;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float largest = LOWEST;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) largest = fmaxf(largest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      largest = fmaxf(most[r], largest * scale);
      const float kept = power_of_two(most[r] - largest);
      most[r] = largest, sum[r] *= kept;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; i++) {
          scores[n][i] = power_of_two(scores[n][i] * scale - largest);
          sum[r] += scores[n][i];
        }
      }
#pragma unroll
      for (int n = 0; n < DIM / 8; n++) answer[n][2 * r] *= kept, answer[n][2 * r + 1] *= kept;
    }
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      const unsigned left0 = narrow_two(scores[2 * k][0], scores[2 * k][1]);
      const unsigned left1 = narrow_two(scores[2 * k][2], scores[2 * k][3]);
      const unsigned left2 = narrow_two(scores[2 * k + 1][0], scores[2 * k + 1][1]);
      const unsigned left3 = narrow_two(scores[2 * k + 1][2], scores[2 * k + 1][3]);
#pragma unroll
      for (int n = 0; n < DIM / 16; n++) {
        unsigned right[4];
        load_turned_matrices(right, from_values + place(k * 16 + lane % 16, n * 2 + lane / 16));
        multiply(answer[2 * n], left0, left1, left2, left3, right[0], right[1]);
        multiply(answer[2 * n + 1], left0, left1, left2, left3, right[2], right[3]);
      }
    }
  }

  // Through shared memory, so that a query's channels leave in one piece.
  __syncthreads();
  unsigned char* const staged = memory + warp * 16 * DIM * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    const float share = 1.0f / sum[r];
    if (weights && pair == 0 && mine + r * 8 < queries) weights[mine + r * 8] = most[r] / LOG2_E + __logf(sum[r]);
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
      *reinterpret_cast<unsigned*>(staged + place(eighth + r * 8, n) + pair * 4) =
          narrow_two(answer[n][2 * r] * share, answer[n][2 * r + 1] * share);
    }
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 16 * CHUNKS / 32; n++) {
    const int at = (n * 32 + lane) / CHUNKS, chunk = (n * 32 + lane) % CHUNKS;
    if (warp * 16 + at >= queries) continue;
    *reinterpret_cast<Eight*>(place_of(warp * 16 + at) + chunk * 8) =
        *reinterpret_cast<const Eight*>(staged + place(at, chunk));
  }
}

// Attention of the tokens of prompts, whose keys and values are in the paged cache already, to all of their row that comes
// before them, and to themselves. A block for each tile of a row's tokens, and KV head. tiles: a row, and the tile's first
// token in the piece of the row that is being computed.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    attend_prompt(Element* __restrict__ output, const Element* __restrict__ query, const Element* __restrict__ key_cache,
                  const Element* __restrict__ value_cache, const int* __restrict__ block_table,
                  const int* __restrict__ past_lengths, const int* __restrict__ cumulative_lengths,
                  const int* __restrict__ tiles, int table_width, int block_size, float scale) {
  const int row = tiles[2 * blockIdx.x], skipped = tiles[2 * blockIdx.x + 1];
  const int kv_head = blockIdx.y, kv_heads = gridDim.y;
  const int first = cumulative_lengths[row] + skipped, position = past_lengths[row] + skipped;
  const int tokens = min(TILE_TOKENS, cumulative_lengths[row + 1] - first);
  auto place_of = [&](int at) {
    return output + ((static_cast<Index>(first + at / GROUP) * kv_heads + kv_head) * GROUP + at % GROUP) * DIM;
  };
  attend_tile<true>(query, key_cache, value_cache, block_table + static_cast<Index>(row) * table_width, block_size, scale,
                    kv_head, kv_heads, first, tokens, position, 0, position + tokens, place_of, nullptr);
}

// Attention of one token a row to a prefix that all rows share: a block for each tile of rows, KV head and part of the
// prefix, of equal parts as many as there are blocks in z. What it finds is laid out as `attend` takes it.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    attend_shared(Element* __restrict__ answers, float* __restrict__ weights, const Element* __restrict__ query,
                  const Element* __restrict__ key_cache, const Element* __restrict__ value_cache,
                  const int* __restrict__ prefix_table, const int* __restrict__ prefix_length, int rows, int block_size,
                  float scale) {
  const int kv_head = blockIdx.y, kv_heads = gridDim.y, length = *prefix_length;
  const int part = (length / TILE_KEYS + gridDim.z - 1) / gridDim.z * TILE_KEYS;
  const int begin = blockIdx.z * part, end = min(begin + part, length);
  const int first = blockIdx.x * TILE_TOKENS, tokens = min(TILE_TOKENS, rows - first);
  const Index found = ((static_cast<Index>(blockIdx.z) * kv_heads + kv_head) * rows + first) * GROUP;
  if (begin >= end) {  // there are more parts than tiles: this one weighs nothing
    for (int i = threadIdx.x; i < tokens * GROUP; i += blockDim.x) weights[found + i] = LOWEST;
    for (int i = threadIdx.x; i < tokens * GROUP * CHUNKS; i += blockDim.x) {
      reinterpret_cast<Eight*>(answers + found * DIM)[i] = Eight{};
    }
    return;
  }
  auto place_of = [&](int at) { return answers + (found + at) * DIM; };
  attend_tile<false>(query, key_cache, value_cache, prefix_table, block_size, scale, kv_head, kv_heads, first, tokens, 0,
                     begin, end, place_of, weights + found);
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
