// A GPU and an ONNX Runtime, pretended on the host: enough of both to run operators.c and kernels.cu as they are, for tests
// on machines without a GPU. Each thread of a block is a fiber; what threads do together (barriers, shuffles, products of
// the tensor cores) is a meeting of fibers. It tells wrong arithmetic, indices, shapes and missing barriers, not speed.
//
// Compiled with KERNELS naming a copy of kernels.cu in which `extern __shared__` is `extern`, and linked with operators.c.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// --- fibers ----------------------------------------------------------------------------------------------------------

struct Index3 {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
};

alignas(128) unsigned char memory[128 << 10];  // shared, of the block that runs

namespace {

constexpr size_t STACK_BYTES = 64 << 10, MESSAGE_BYTES = 64;
constexpr int WARP = 32;

struct Copy {
  unsigned address;
  const void* from;
  bool is_there;
  int group;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  Index3 index{};
  bool has_ended = false;
  std::vector<Copy> copies;  // to shared memory, said and not done
  int groups = 0;
};

struct Meeting {  // of a warp; its messages stay readable until the next but one
  unsigned char messages[2][WARP][MESSAGE_BYTES];
  int arrived = 0;
  unsigned generation = 0;
};

std::vector<Fiber> fibers;
std::vector<Meeting> meetings;
Fiber* current;
ucontext_t scheduler;
std::function<void()> kernel;
int alive, waiting;  // at the block's barrier
unsigned barrier;
bool has_progress, copies_at_once;

void yield() { swapcontext(&current->context, &scheduler); }

void run_fiber() {
  kernel();
  current->has_ended = has_progress = true;
  alive--;
  swapcontext(&current->context, &scheduler);
}

// What all lanes of this warp bring to a point that they all come to.
template <typename Message>
const Message& met(int lane, unsigned generation) {
  static_assert(sizeof(Message) <= MESSAGE_BYTES);
  const Meeting& meeting = meetings[current->index.x / WARP];
  return *reinterpret_cast<const Message*>(meeting.messages[generation % 2][lane]);
}

template <typename Message>
unsigned meet(const Message& mine) {
  Meeting& meeting = meetings[current->index.x / WARP];
  const unsigned generation = meeting.generation;
  std::memcpy(meeting.messages[generation % 2][current->index.x % WARP], &mine, sizeof mine);
  if (++meeting.arrived == WARP) {
    meeting.arrived = 0, meeting.generation++;
    has_progress = true;
  }
  while (meeting.generation == generation) yield();
  return generation;
}

void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers.resize(threads);
  meetings.assign((threads + WARP - 1) / WARP, Meeting{});
  std::memset(memory, 0xff, sizeof memory);  // no numbers, until something is written there
  alive = static_cast<int>(threads), waiting = 0;
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.index = {i, 0, 0}, fiber.has_ended = false, fiber.groups = 0;
    fiber.copies.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  while (alive) {
    has_progress = false;
    for (unsigned i = 0; i < threads; i++) {
      if (fibers[i].has_ended) continue;
      current = &fibers[i];
      swapcontext(&scheduler, &current->context);
    }
    if (!has_progress) throw std::runtime_error("threads wait for each other for ever");
  }
}

}  // namespace

// --- what a kernel can say -------------------------------------------------------------------------------------------

Index3 blockIdx, gridDim, blockDim;
#define threadIdx (current->index)
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __align__(bytes)
#define __shared__ static

using std::max;
using std::min;
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __int_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void __syncthreads() {
  const unsigned generation = barrier;
  waiting++;
  while (barrier == generation) {
    if (waiting == alive) {  // also when the last of the others has ended
      waiting = 0, barrier++;
      has_progress = true;
      break;
    }
    yield();
  }
}
inline void __syncwarp() { meet(0); }

template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int distance) {
  const unsigned generation = meet(value);
  return met<Value>((current->index.x % WARP) ^ distance, generation);
}
template <typename Value>
Value __shfl_down_sync(unsigned, Value value, int distance) {
  const int from = current->index.x % WARP + distance;
  const unsigned generation = meet(value);
  return met<Value>(from < WARP ? from : from - distance, generation);
}

inline unsigned bits_of(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

#ifdef BFLOAT16
inline float widen(unsigned short bits) { return __int_as_float(static_cast<unsigned>(bits) << 16); }
inline unsigned short narrow(float value) {
  const unsigned bits = bits_of(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
inline float widened(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(static_cast<float>(fraction), -24));
}
const std::vector<float> WIDENED = [] {  // looking them up is what most of a test's time would go to otherwise
  std::vector<float> all(1 << 16);
  for (int bits = 0; bits < 1 << 16; bits++) all[bits] = widened(static_cast<unsigned short>(bits));
  return all;
}();
inline float widen(unsigned short bits) { return WIDENED[bits]; }
inline unsigned short narrow(float value) {
  const unsigned short sign = static_cast<unsigned short>(bits_of(value) >> 16 & 0x8000);
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 0x1p-14f) return sign | static_cast<unsigned short>(std::nearbyint(std::ldexp(size, 24)));
  const int exponent = std::ilogb(size);
  const int fraction = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 1024 to 2048
  return sign | static_cast<unsigned short>(((exponent + 15) << 10) + fraction - 1024);
}
#endif

inline unsigned narrow_two(float first, float second) { return narrow(first) | static_cast<unsigned>(narrow(second)) << 16; }
inline float power_of_two(float exponent) { return std::exp2(exponent); }
inline unsigned shared_address(const void* where) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(where) - memory);
}

inline void do_copy(const Copy& copy) {
  if (copy.address + 16 > sizeof memory) throw std::runtime_error("a copy beyond shared memory");
  if (copy.is_there) {
    std::memcpy(memory + copy.address, copy.from, 16);
  } else {
    std::memset(memory + copy.address, 0, 16);
  }
}
// Hardware may do a copy at once or when it is waited for. Both are tried.
inline void copy_later(unsigned address, const unsigned short* from, bool is_there) {
  const Copy copy = {address, from, is_there, current->groups};
  if (copies_at_once) {
    do_copy(copy);
  } else {
    current->copies.push_back(copy);
  }
}
inline void mark_copies() { current->groups++; }
template <int COUNT>
void await_copies() {
  auto& copies = current->copies;
  const auto is_due = [](const Copy& copy) { return copy.group < current->groups - COUNT; };
  for (const Copy& copy : copies) {
    if (is_due(copy)) do_copy(copy);
  }
  copies.erase(std::remove_if(copies.begin(), copies.end(), is_due), copies.end());
}

inline unsigned short element(unsigned address, int at) {
  unsigned short bits;
  std::memcpy(&bits, memory + address + 2 * at, sizeof bits);
  return bits;
}
inline unsigned both(unsigned short first, unsigned short second) { return first | static_cast<unsigned>(second) << 16; }

inline void load_matrices(unsigned (&to)[4], unsigned address) {
  const int lane = current->index.x % WARP;
  const unsigned generation = meet(address);
  for (int i = 0; i < 4; i++) {
    const unsigned row = met<unsigned>(i * 8 + lane / 4, generation);
    to[i] = both(element(row, lane % 4 * 2), element(row, lane % 4 * 2 + 1));
  }
  __syncwarp();  // the instruction has read before any lane goes on
}
inline void load_turned_matrices(unsigned (&to)[4], unsigned address) {
  const int lane = current->index.x % WARP;
  const unsigned generation = meet(address);
  for (int i = 0; i < 4; i++) {
    const unsigned first = met<unsigned>(i * 8 + lane % 4 * 2, generation);
    const unsigned second = met<unsigned>(i * 8 + lane % 4 * 2 + 1, generation);
    to[i] = both(element(first, lane / 4), element(second, lane / 4));
  }
  __syncwarp();
}

inline unsigned short half_of(unsigned bits, int which) { return static_cast<unsigned short>(bits >> 16 * which); }

inline unsigned turn(unsigned bits) {
  const int lane = current->index.x % WARP, row = lane / 4, column = lane % 4 * 2;  // of the turned matrix
  const unsigned generation = meet(bits);
  return both(half_of(met<unsigned>(column * 4 + row / 2, generation), row % 2),
              half_of(met<unsigned>((column + 1) * 4 + row / 2, generation), row % 2));
}

struct Factors {
  unsigned left[4], right[2];
};

inline void multiply(float (&sum)[4], unsigned left0, unsigned left1, unsigned left2, unsigned left3, unsigned right0,
                     unsigned right1) {
  const int lane = current->index.x % WARP;
  const unsigned generation = meet(Factors{{left0, left1, left2, left3}, {right0, right1}});
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const Factors& left = met<Factors>(row % 8 * 4 + k % 8 / 2, generation);
      const Factors& right = met<Factors>(column * 4 + k % 8 / 2, generation);
      sum[i] += widen(half_of(left.left[k / 8 * 2 + row / 8], k % 2)) * widen(half_of(right.right[k / 8], k % 2));
    }
  }
}

#include KERNELS

// --- launches --------------------------------------------------------------------------------------------------------

namespace {

template <typename... Parameters, size_t... AT>
void call(void (*function)(Parameters...), void** arguments, std::index_sequence<AT...>) {
  function(*static_cast<std::remove_cv_t<Parameters>*>(arguments[AT])...);
}
template <typename... Parameters>
std::function<void(void**)> callable(void (*function)(Parameters...)) {
  return [function](void** arguments) { call(function, arguments, std::index_sequence_for<Parameters...>{}); };
}

std::function<void(void**)> kernels[] = {
    callable(rotate_append), callable(gated_product), callable(row_argmax),
#ifdef ATTEND_DIM
    callable(attend),        callable(attend_join),   callable(attend_prompt), callable(attend_shared),
#endif
};

std::string trouble;

int launch(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned shared_bytes,
           void*, void** arguments, void**) {
  if (shared_bytes > sizeof memory) return 1;
  try {
    gridDim = {x, y, z}, blockDim = {threads, 1, 1};
    kernel = [&] { (*static_cast<std::function<void(void**)>*>(function))(arguments); };
    for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++) {
      for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) run_block(threads);
      }
    }
  } catch (const std::exception& error) {
    trouble = error.what();
    return 2;
  }
  return 0;
}

// --- ONNX Runtime ----------------------------------------------------------------------------------------------------

struct Tensor {
  void* data;
  int64_t rank;
  int64_t shape[4];
};
struct Context {
  Tensor *inputs, *outputs;
};
struct CustomOp {  // as far as it is used here; see operators.c
  uint32_t version;
  void* create_kernel;
  const char* (*get_name)(const CustomOp*);
  void* unused[6];
  void (*kernel_destroy)(void*);
  void* unused_too[7];
  void* (*create_kernel_v2)(const CustomOp*, const void*, const void*, void**);
  void* (*kernel_compute_v2)(void*, void*);
};
using Status = std::string*;

std::vector<const CustomOp*> ops;

Status create_status(int, const char* message) { return new std::string(message); }
Status create_domain(const char*, void** domain) { return *domain = &ops, nullptr; }
Status add_op(void*, const CustomOp* op) { return ops.push_back(op), nullptr; }
Status add_domain(void*, void*) { return nullptr; }
Status get_data(Tensor* tensor, void** data) { return *data = tensor->data, nullptr; }
Status get_info(Tensor* tensor, void** info) { return *info = tensor, nullptr; }
Status get_rank(const Tensor* tensor, size_t* rank) { return *rank = static_cast<size_t>(tensor->rank), nullptr; }
Status get_shape(const Tensor* tensor, int64_t* shape, size_t rank) {
  std::copy_n(tensor->shape, rank, shape);
  return nullptr;
}
void release_info(void*) {}
Status get_float(const void* info, const char*, float* value) { return *value = *static_cast<const float*>(info), nullptr; }
Status get_input(const Context* context, size_t index, const void** value) {
  return *value = &context->inputs[index], nullptr;
}
Status get_output(Context* context, size_t index, const int64_t* shape, size_t rank, void** value) {
  Tensor* output = &context->outputs[index];
  if (static_cast<size_t>(output->rank) != rank || !std::equal(shape, shape + rank, output->shape)) {
    return new std::string("an output has another shape than the test expects");
  }
  return *value = output, nullptr;
}
Status get_stream(const Context*, void** stream) { return *stream = nullptr, nullptr; }

const void* table[256];

const void* const* get_api(uint32_t) { return table; }

struct ApiBase {
  const void* const* (*get_api)(uint32_t);
  const char* (*get_version)();
};

}  // namespace

extern "C" {

Status RegisterCustomOps(void* options, const ApiBase* base);
void promptmill_set_kernels(int is_bfloat16, void* launch, void* const* functions, int dim, int group);

// Run an operator by name. scale: its attribute. at_once: whether copies to shared memory are done when they are said, or
// when they are waited for. Returns 0, or what went wrong in `message`.
int run_operator(const char* name, Tensor* inputs, Tensor* outputs, float scale, int at_once, char* message, size_t room) {
  if (ops.empty()) {
    const std::pair<int, const void*> functions[] = {
        {0, reinterpret_cast<void*>(create_status)}, {26, reinterpret_cast<void*>(create_domain)},
        {27, reinterpret_cast<void*>(add_op)},       {28, reinterpret_cast<void*>(add_domain)},
        {51, reinterpret_cast<void*>(get_data)},     {61, reinterpret_cast<void*>(get_rank)},
        {62, reinterpret_cast<void*>(get_shape)},    {65, reinterpret_cast<void*>(get_info)},
        {85, reinterpret_cast<void*>(get_float)},    {90, reinterpret_cast<void*>(get_input)},
        {91, reinterpret_cast<void*>(get_output)},   {99, reinterpret_cast<void*>(release_info)},
        {193, reinterpret_cast<void*>(get_stream)},
    };
    for (const auto& [at, function] : functions) table[at] = function;
    const ApiBase base = {get_api, nullptr};
    RegisterCustomOps(nullptr, &base);
    std::vector<void*> pointers;
    for (auto& each : kernels) pointers.push_back(&each);
    int is_bfloat16 = 0, dim = 0, group = 0;
#ifdef BFLOAT16
    is_bfloat16 = 1;
#endif
#ifdef ATTEND_DIM
    dim = ATTEND_DIM, group = ATTEND_GROUP;
#endif
    promptmill_set_kernels(is_bfloat16, reinterpret_cast<void*>(launch), pointers.data(), dim, group);
  }
  copies_at_once = at_once;
  for (const CustomOp* op : ops) {
    if (std::strcmp(op->get_name(op), name)) continue;
    void* node;
    Context context = {inputs, outputs};
    trouble.clear();
    auto status = static_cast<Status>(op->create_kernel_v2(op, table, &scale, &node));
    if (!status) {
      status = static_cast<Status>(op->kernel_compute_v2(node, &context));
      op->kernel_destroy(node);
    }
    if (!status) return 0;
    std::snprintf(message, room, "%s %s", status->c_str(), trouble.c_str());
    delete status;
    return 1;
  }
  std::snprintf(message, room, "there is no operator %s", name);
  return 1;
}
}
