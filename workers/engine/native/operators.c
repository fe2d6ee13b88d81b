/* Operators of the CUDA flavour that ONNX Runtime does not have: each checks its shapes and launches one kernel of
 * kernels.cu on the stream of the run. A library for `SessionOptions.register_custom_ops_library`.
 *
 * It needs no header but the C library's. ONNX Runtime hands its functions over as a table, to which releases only
 * append, so the few that are used are named by their places in it; `OrtCustomOp` is laid out as of API version 16.
 * Both as in onnxruntime_c_api.h. The kernels come from Python (workers/engine/cuda_ops.py), which compiles them for the
 * device at hand.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { API_VERSION = 16 };

enum { /* places in the table of functions */
  CREATE_STATUS = 0,
  CREATE_CUSTOM_OP_DOMAIN = 26,
  CUSTOM_OP_DOMAIN_ADD = 27,
  ADD_CUSTOM_OP_DOMAIN = 28,
  GET_TENSOR_MUTABLE_DATA = 51,
  GET_DIMENSIONS_COUNT = 61,
  GET_DIMENSIONS = 62,
  GET_TENSOR_TYPE_AND_SHAPE = 65,
  KERNEL_INFO_GET_ATTRIBUTE_FLOAT = 85,
  KERNEL_CONTEXT_GET_INPUT = 90,
  KERNEL_CONTEXT_GET_OUTPUT = 91,
  RELEASE_TENSOR_TYPE_AND_SHAPE_INFO = 99,
  KERNEL_CONTEXT_GET_GPU_COMPUTE_STREAM = 193,
};

enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };              /* OrtErrorCode */
enum { FLOAT = 1, INT32 = 6, INT64 = 7, FLOAT16 = 10, BFLOAT16 = 16 }; /* ONNXTensorElementDataType */
enum { REQUIRED = 0, MEMORY_DEFAULT = 0 };
enum { MAX_RANK = 4, MAX_INPUTS = 8, MAX_GROUP = 8 };
enum { THREADS = 256, ARGMAX_THREADS = 512, ATTEND_THREADS = 128 };
/* Of attention: tokens of a segment, and blocks that fill any device of today. */
enum { LEAST_SEGMENT = 128, MOST_SEGMENT = 512, ENOUGH_BLOCKS = 512 };
/* Tokens whose keys and values a block has in shared memory or on their way there, and of the attention of many queries
 * what it takes at once; see kernels.cu. */
enum { SHARED_TOKENS = 128, TILE_QUERIES = 128, TILE_KEYS = 64, TILE_THREADS = 256 };
/* Of attention to a shared prefix: blocks that keep a device busy, and parts into which it is cut for that. */
enum { BUSY_BLOCKS = 128, MOST_PARTS = 8 };

typedef void *Status; /* NULL is success */

typedef struct {
  const void *const *(*get_api)(uint32_t version);
  const char *(*get_version)(void);
} ApiBase;

typedef struct Op Op;
struct Op { /* OrtCustomOp */
  uint32_t version;
  void *(*create_kernel)(const Op *, const void *api, const void *info);
  const char *(*get_name)(const Op *);
  const char *(*get_execution_provider_type)(const Op *);
  int (*get_input_type)(const Op *, size_t);
  size_t (*get_input_type_count)(const Op *);
  int (*get_output_type)(const Op *, size_t);
  size_t (*get_output_type_count)(const Op *);
  void (*kernel_compute)(void *kernel, void *context);
  void (*kernel_destroy)(void *kernel);
  int (*get_input_characteristic)(const Op *, size_t);
  int (*get_output_characteristic)(const Op *, size_t);
  int (*get_input_memory_type)(const Op *, size_t);
  int (*get_variadic_input_min_arity)(const Op *);
  int (*get_variadic_input_homogeneity)(const Op *);
  int (*get_variadic_output_min_arity)(const Op *);
  int (*get_variadic_output_homogeneity)(const Op *);
  Status (*create_kernel_v2)(const Op *, const void *api, const void *info, void **kernel);
  Status (*kernel_compute_v2)(void *kernel, void *context);
};

struct Node;

typedef struct {
  Op op; /* first, so that an Op * is an Operator * */
  const char *name;
  int element;
  size_t input_count, output_count;
  const int *input_types, *output_types; /* 0 stands for `element` */
  Status (*compute)(const struct Node *, void *context);
} Operator;

typedef struct Node { /* an operator at its place in a graph */
  const Operator *operator;
  float scale;
} Node;

/* cuLaunchKernel of the driver. */
typedef int (*Launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *stream,
                      void **arguments, void **extra);

enum { /* the kernels; those of attention exist for each kind of head that a model of this process has */
  ROTATE_APPEND,
  GATED_PRODUCT,
  ROW_ARGMAX,
  ATTEND,
  ATTEND_JOIN = ATTEND + 2 * MAX_GROUP,
  ATTEND_PROMPT = ATTEND_JOIN + 2 * MAX_GROUP,
  ATTEND_SHARED = ATTEND_PROMPT + 2 * MAX_GROUP,
  KERNELS = ATTEND_SHARED + 2 * MAX_GROUP,
};

static const void *const *api;
static Launch launch_kernel;
static void *kernels[2][KERNELS]; /* float16, bfloat16 */

#define API(place, type) ((type)api[place])

static Status fail(int code, const char *message) {
  return API(CREATE_STATUS, Status(*)(int, const char *))(code, message);
}

#define CHECK(call)                     \
  do {                                  \
    Status status_ = (call);            \
    if (status_) return status_;        \
  } while (0)

typedef struct {
  void *data;
  size_t rank;
  int64_t shape[MAX_RANK];
} Tensor;

static Status read_input(void *context, size_t index, Tensor *tensor) {
  const void *value;
  void *info;
  CHECK(API(KERNEL_CONTEXT_GET_INPUT, Status(*)(const void *, size_t, const void **))(context, index, &value));
  CHECK(API(GET_TENSOR_MUTABLE_DATA, Status(*)(const void *, void **))(value, &tensor->data));
  CHECK(API(GET_TENSOR_TYPE_AND_SHAPE, Status(*)(const void *, void **))(value, &info));
  Status status = API(GET_DIMENSIONS_COUNT, Status(*)(const void *, size_t *))(info, &tensor->rank);
  if (!status && tensor->rank > MAX_RANK) status = fail(ORT_INVALID_ARGUMENT, "an input has more than four dimensions");
  if (!status) {
    status = API(GET_DIMENSIONS, Status(*)(const void *, int64_t *, size_t))(info, tensor->shape, tensor->rank);
  }
  API(RELEASE_TENSOR_TYPE_AND_SHAPE_INFO, void (*)(void *))(info);
  return status;
}

static Status make_output(void *context, size_t index, const int64_t *shape, size_t rank, void **data) {
  void *value;
  CHECK(API(KERNEL_CONTEXT_GET_OUTPUT, Status(*)(void *, size_t, const int64_t *, size_t, void **))(
      context, index, shape, rank, &value));
  return API(GET_TENSOR_MUTABLE_DATA, Status(*)(void *, void **))(value, data);
}

static Status read_inputs(const Node *node, void *context, Tensor *tensors) {
  for (size_t i = 0; i < node->operator->input_count; i++) CHECK(read_input(context, i, &tensors[i]));
  return NULL;
}

static Status launch(const Node *node, void *context, int kernel, const unsigned *grid, unsigned threads,
                     unsigned shared_bytes, void **arguments) {
  void *stream;
  void *function = kernels[node->operator->element == BFLOAT16][kernel];
  CHECK(API(KERNEL_CONTEXT_GET_GPU_COMPUTE_STREAM, Status(*)(const void *, void **))(context, &stream));
  if (!function || !launch_kernel) return fail(ORT_FAIL, "the kernels were not handed over before the session was run");
  int error =
      launch_kernel(function, grid[0], grid[1], grid[2], threads, 1, 1, shared_bytes, stream, arguments, NULL);
  if (error) {
    char message[96];
    snprintf(message, sizeof message, "%s: launch failed with CUDA driver error %d", node->operator->name, error);
    return fail(ORT_FAIL, message);
  }
  return NULL;
}

/* qkv [T, (H + 2 KV) D], positions int64 [T] or [T, 1], slots int32 [T], cos and sin [positions, D / 2], key_cache and
 * value_cache [blocks, block_size, KV, D] -> query [T, H D], rotated, and an output [T, KV D] that nobody writes: it stands
 * for the keys and values that PagedAttention wants to see and then does not store. Rotated keys, and values, go to their
 * slots in the caches; a negative slot stores nothing. */
static Status rotate_append(const Node *node, void *context) {
  Tensor in[MAX_INPUTS];
  CHECK(read_inputs(node, context, in));
  Tensor qkv = in[0], positions = in[1], slots = in[2], cosine = in[3], sine = in[4], keys = in[5], values = in[6];
  if (qkv.rank != 2 || keys.rank != 4 || cosine.rank != 2) {
    return fail(ORT_INVALID_ARGUMENT, "RotateAppend: qkv and tables have two dimensions, caches four");
  }
  int64_t tokens = qkv.shape[0], dim = keys.shape[3], kv_heads = keys.shape[2];
  int64_t heads = qkv.shape[1] / dim - 2 * kv_heads;
  if (dim % 8 || heads < 1 || qkv.shape[1] != (heads + 2 * kv_heads) * dim || cosine.shape[1] * 2 != dim ||
      positions.shape[0] != tokens || slots.shape[0] != tokens) {
    return fail(ORT_INVALID_ARGUMENT, "RotateAppend: the shapes of qkv, caches, tables, positions and slots disagree");
  }
  int64_t query_shape[] = {tokens, heads * dim}, key_shape[] = {tokens, kv_heads * dim};
  void *query, *unwritten;
  CHECK(make_output(context, 0, query_shape, 2, &query));
  CHECK(make_output(context, 1, key_shape, 2, &unwritten));
  if (!tokens) return NULL;
  int heads_ = (int)heads, kv_heads_ = (int)kv_heads, dim_ = (int)dim;
  void *arguments[] = {&query,       &qkv.data,  &positions.data, &slots.data, &cosine.data, &sine.data,
                       &keys.data,   &values.data, &heads_,       &kv_heads_,  &dim_};
  /* Few tokens are spread over more blocks, so that the device is not left idle. */
  unsigned grid[] = {(unsigned)tokens, tokens < 1024 ? 4 : 1, 1};
  return launch(node, context, ROTATE_APPEND, grid, THREADS, 0, arguments);
}

/* gate and up [T, 2 I], the gates first -> silu(gate) * up [T, I] */
static Status gated_product(const Node *node, void *context) {
  Tensor both;
  CHECK(read_input(context, 0, &both));
  if (both.rank != 2 || both.shape[1] % 2) {
    return fail(ORT_INVALID_ARGUMENT, "GatedProduct: gate and up lie side by side, in two dimensions");
  }
  int64_t tokens = both.shape[0], shape[] = {tokens, both.shape[1] / 2};
  void *output;
  CHECK(make_output(context, 0, shape, 2, &output));
  if (!tokens || !shape[1]) return NULL;
  int columns = (int)shape[1];
  void *arguments[] = {&output, &both.data, &columns};
  unsigned grid[] = {(unsigned)tokens, tokens < 1024 ? 4 : 1, 1};
  return launch(node, context, GATED_PRODUCT, grid, THREADS, 0, arguments);
}

/* logits [S, V] -> the first largest of each row, int64 [S] */
static Status row_argmax(const Node *node, void *context) {
  Tensor logits;
  CHECK(read_input(context, 0, &logits));
  if (logits.rank != 2) return fail(ORT_INVALID_ARGUMENT, "RowArgmax: logits have two dimensions");
  void *output;
  CHECK(make_output(context, 0, logits.shape, 1, &output));
  if (!logits.shape[0]) return NULL;
  int columns = (int)logits.shape[1];
  void *arguments[] = {&output, &logits.data, &columns};
  unsigned grid[] = {(unsigned)logits.shape[0], 1, 1};
  return launch(node, context, ROW_ARGMAX, grid, ARGMAX_THREADS, 0, arguments);
}

static unsigned shared_bytes(int64_t dim) { return (unsigned)(SHARED_TOKENS * 2 * dim * 2); } /* keys and values */
static int head_kind(int dim, int group) { return (dim == 64 ? 0 : MAX_GROUP) + group - 1; }
static int fits_heads(int64_t dim, int64_t group) { return (dim == 64 || dim == 128) && group >= 1 && group <= MAX_GROUP; }

/* query [B, H D], one token of each row, rotated; key_cache and value_cache [blocks, block_size, KV, D], its own key and
 * value stored; block_table int32 [B, M]; past_lengths int32 [B]; room float32 [n] for the answers of the segments into
 * which long contexts are cut: as many as fill the device, or as keep one long row from holding up all -> [B, H D]. With a
 * prefix also what AttendShared gives. */
static Status attend(const Node *node, void *context) {
  Tensor in[MAX_INPUTS];
  CHECK(read_inputs(node, context, in));
  Tensor query = in[0], keys = in[1], values = in[2], table = in[3], past = in[4];
  if (query.rank != 2 || keys.rank != 4 || table.rank != 2) {
    return fail(ORT_INVALID_ARGUMENT, "Attend: query and block table have two dimensions, caches four");
  }
  int64_t rows = query.shape[0], dim = keys.shape[3], kv_heads = keys.shape[2];
  int64_t group = query.shape[1] / dim / kv_heads;
  if (!fits_heads(dim, group) || query.shape[1] != group * kv_heads * dim || keys.shape[1] % 32 ||
      table.shape[0] != rows || past.shape[0] != rows) {
    return fail(ORT_INVALID_ARGUMENT,
                "Attend: heads of 64 or 128 channels, one to eight to a KV head, blocks of a multiple of 32, and a table and "
                "a length for each row");
  }
  void *output, *answer = NULL, *weight = NULL;
  int parts = 0;
  CHECK(make_output(context, 0, query.shape, 2, &output));
  if (node->operator->input_count > 6) {
    answer = in[6].data, weight = in[7].data;
    parts = (int)in[6].shape[0];
    if (in[6].rank != 4 || in[6].shape[1] != kv_heads || in[6].shape[2] != rows * group || in[6].shape[3] != dim) {
      return fail(ORT_INVALID_ARGUMENT, "Attend: the prefix has an answer for each head and row");
    }
  }
  if (!rows) return NULL;
  int width = (int)table.shape[1], block_size = (int)keys.shape[1];
  int segment = MOST_SEGMENT;
  while (segment > LEAST_SEGMENT && rows * kv_heads * ((width * block_size + segment - 1) / segment) < ENOUGH_BLOCKS) {
    segment /= 2;
  }
  int segments = (width * block_size + segment - 1) / segment;
  void *partial = in[5].data;
  if (segments > 1 && in[5].shape[0] < rows * kv_heads * segments * group * (dim + 2)) {
    return fail(ORT_INVALID_ARGUMENT, "Attend: there is no room for the answers of all segments");
  }
  float scale = node->scale;
  void *arguments[] = {&output, &query.data, &keys.data, &values.data, &table.data, &past.data, &answer,
                       &weight, &partial,    &width,     &block_size,  &segment,    &parts,     &scale};
  int kind = head_kind((int)dim, (int)group);
  unsigned grid[] = {(unsigned)kv_heads, (unsigned)rows, (unsigned)segments};
  CHECK(launch(node, context, ATTEND + kind, grid, ATTEND_THREADS, shared_bytes(dim), arguments));
  if (segments == 1) return NULL;
  void *join[] = {&output, &partial, &past.data, &segment, &segments};
  grid[2] = 1;
  return launch(node, context, ATTEND_JOIN + kind, grid, ATTEND_THREADS, 0, join);
}

/* query [T, H D], the tokens of R rows one row behind the other, rotated; key_cache and value_cache [blocks, block_size, KV,
 * D], their keys and values stored; block_table int32 [R, M]; past_lengths int32 [R], tokens before these;
 * cumulative_lengths int32 [R + 1], where each row's begin; tiles int32 [n, 2], a row and where among its tokens a tile
 * begins, each of 128 / (H / KV) tokens, such that all tokens are in one -> [T, H D]. */
static Status attend_prompt(const Node *node, void *context) {
  Tensor in[MAX_INPUTS];
  CHECK(read_inputs(node, context, in));
  Tensor query = in[0], keys = in[1], values = in[2], table = in[3], past = in[4], cumulative = in[5], tiles = in[6];
  if (query.rank != 2 || keys.rank != 4 || table.rank != 2 || tiles.rank != 2) {
    return fail(ORT_INVALID_ARGUMENT, "AttendPrompt: query, block table and tiles have two dimensions, caches four");
  }
  int64_t rows = table.shape[0], dim = keys.shape[3], kv_heads = keys.shape[2], heads = query.shape[1] / dim;
  if (!fits_heads(dim, heads / kv_heads) || query.shape[1] != heads * dim || heads % kv_heads ||
      keys.shape[1] % TILE_KEYS || past.shape[0] != rows || cumulative.shape[0] != rows + 1 || tiles.shape[1] != 2) {
    return fail(ORT_INVALID_ARGUMENT,
                "AttendPrompt: heads of 64 or 128 channels, one to eight to a KV head, blocks of a multiple of 64, and a "
                "table, a past and a length for each row");
  }
  void *output;
  CHECK(make_output(context, 0, query.shape, 2, &output));
  if (!query.shape[0]) return NULL;
  int width = (int)table.shape[1], block_size = (int)keys.shape[1];
  float scale = node->scale;
  void *arguments[] = {&output,          &query.data, &keys.data, &values.data, &table.data, &past.data,
                       &cumulative.data, &tiles.data, &width,     &block_size,  &scale};
  unsigned grid[] = {(unsigned)tiles.shape[0], (unsigned)kv_heads, 1};
  return launch(node, context, ATTEND_PROMPT + head_kind((int)dim, (int)(heads / kv_heads)), grid, TILE_THREADS,
                shared_bytes(dim), arguments);
}

/* query [B, H D], one token of each row, rotated; key_cache and value_cache [blocks, block_size, KV, D]; prefix_table int32
 * [n] and prefix_length int32 [1], a multiple of 64 and at least one: the blocks that all rows begin with, and their tokens
 * -> for each of P parts of the prefix, their number chosen by the rows alone: the answer [P, KV, B H / KV, D], and float32
 * [P, KV, B H / KV], the logarithm of its sum of exponentials. */
static Status attend_shared(const Node *node, void *context) {
  Tensor in[MAX_INPUTS];
  CHECK(read_inputs(node, context, in));
  Tensor query = in[0], keys = in[1], values = in[2], table = in[3], length = in[4];
  if (query.rank != 2 || keys.rank != 4 || table.rank != 1 || length.rank != 1) {
    return fail(ORT_INVALID_ARGUMENT, "AttendShared: query has two dimensions, caches four, prefix table and length one");
  }
  int64_t rows = query.shape[0], dim = keys.shape[3], kv_heads = keys.shape[2], group = query.shape[1] / dim / kv_heads;
  if (!fits_heads(dim, group) || query.shape[1] != group * kv_heads * dim || keys.shape[1] % TILE_KEYS) {
    return fail(ORT_INVALID_ARGUMENT,
                "AttendShared: heads of 64 or 128 channels, one to eight to a KV head, and blocks of a multiple of 64");
  }
  int64_t tile_rows = TILE_QUERIES / group, tiles = (rows + tile_rows - 1) / tile_rows, parts = 1;
  while (parts < MOST_PARTS && tiles * kv_heads * parts < BUSY_BLOCKS) parts *= 2;
  int64_t shape[] = {parts, kv_heads, rows * group, dim};
  void *answers, *weights;
  CHECK(make_output(context, 0, shape, 4, &answers));
  CHECK(make_output(context, 1, shape, 3, &weights));
  if (!rows) return NULL;
  int rows_ = (int)rows, block_size = (int)keys.shape[1];
  float scale = node->scale;
  void *arguments[] = {&answers,    &weights,     &query.data, &keys.data,  &values.data,
                       &table.data, &length.data, &rows_,      &block_size, &scale};
  unsigned grid[] = {(unsigned)tiles, (unsigned)kv_heads, (unsigned)parts};
  return launch(node, context, ATTEND_SHARED + head_kind((int)dim, (int)group), grid, TILE_THREADS,
                shared_bytes(dim), arguments);
}

static Status compute(void *kernel, void *context) {
  const Node *node = kernel;
  return node->operator->compute(node, context);
}

static Status create_kernel(const Op *op, const void *table, const void *info, void **kernel) {
  (void)table;
  Node *node = malloc(sizeof *node);
  if (!node) return fail(ORT_FAIL, "out of memory");
  node->operator = (const Operator *)op;
  node->scale = 0;
  if (node->operator->compute == attend || node->operator->compute == attend_prompt ||
      node->operator->compute == attend_shared) {
    Status status =
        API(KERNEL_INFO_GET_ATTRIBUTE_FLOAT, Status(*)(const void *, const char *, float *))(info, "scale", &node->scale);
    if (status) {
      free(node);
      return status;
    }
  }
  *kernel = node;
  return NULL;
}

static void destroy_kernel(void *kernel) { free(kernel); }
static const char *get_name(const Op *op) { return ((const Operator *)op)->name; }
static const char *get_provider(const Op *op) { return (void)op, "CUDAExecutionProvider"; }
static size_t get_input_count(const Op *op) { return ((const Operator *)op)->input_count; }
static size_t get_output_count(const Op *op) { return ((const Operator *)op)->output_count; }
static int required(const Op *op, size_t index) { return (void)op, (void)index, REQUIRED; }
static int on_device(const Op *op, size_t index) { return (void)op, (void)index, MEMORY_DEFAULT; }
static int none(const Op *op) { return (void)op, 0; }

static int type_of(const Operator *operator, const int *types, size_t index) {
  return types[index] ? types[index] : operator->element;
}
static int get_input_type(const Op *op, size_t index) {
  return type_of((const Operator *)op, ((const Operator *)op)->input_types, index);
}
static int get_output_type(const Op *op, size_t index) {
  return type_of((const Operator *)op, ((const Operator *)op)->output_types, index);
}

static const int ELEMENTS[] = {0, 0}, INDICES[] = {INT64}, WITH_FLOATS[] = {0, FLOAT};
static const int ROTATE_INPUTS[] = {0, INT64, INT32, 0, 0, 0, 0}, ATTEND_INPUTS[] = {0, 0, 0, INT32, INT32, FLOAT, 0, FLOAT};
static const int PROMPT_INPUTS[] = {0, 0, 0, INT32, INT32, INT32, INT32};

#define OP                                                                                                       \
  {API_VERSION, NULL, get_name, get_provider, get_input_type, get_input_count, get_output_type,                  \
   get_output_count, NULL, destroy_kernel, required, required, on_device, none, none, none, none, create_kernel, \
   compute}

#define OPERATORS(suffix, element)                                                             \
  {OP, "RotateAppend_" suffix, element, 7, 2, ROTATE_INPUTS, ELEMENTS, rotate_append},         \
      {OP, "GatedProduct_" suffix, element, 1, 1, ELEMENTS, ELEMENTS, gated_product},          \
      {OP, "RowArgmax_" suffix, element, 1, 1, ELEMENTS, INDICES, row_argmax},                 \
      {OP, "Attend_" suffix, element, 6, 1, ATTEND_INPUTS, ELEMENTS, attend},                  \
      {OP, "AttendPrefixed_" suffix, element, 8, 1, ATTEND_INPUTS, ELEMENTS, attend},          \
      {OP, "AttendPrompt_" suffix, element, 7, 1, PROMPT_INPUTS, ELEMENTS, attend_prompt},     \
      {OP, "AttendShared_" suffix, element, 5, 2, PROMPT_INPUTS, WITH_FLOATS, attend_shared}

static const Operator operators[] = {OPERATORS("float16", FLOAT16), OPERATORS("bfloat16", BFLOAT16)};

/* Called by Python, before a session of this element type is run: the driver's launch function and the kernels of
 * kernels.cu, the last four of them for heads of this kind. */
void promptmill_set_kernels(int is_bfloat16, Launch launch, void *const *functions, int dim, int group) {
  void **ours = kernels[is_bfloat16 != 0];
  launch_kernel = launch;
  for (int i = 0; i < ATTEND; i++) ours[i] = functions[i];
  if (group) {
    ours[ATTEND + head_kind(dim, group)] = functions[ATTEND];
    ours[ATTEND_JOIN + head_kind(dim, group)] = functions[ATTEND + 1];
    ours[ATTEND_PROMPT + head_kind(dim, group)] = functions[ATTEND + 2];
    ours[ATTEND_SHARED + head_kind(dim, group)] = functions[ATTEND + 3];
  }
}

/* Called by ONNX Runtime when the library is registered with the options of a session. */
Status RegisterCustomOps(void *options, const ApiBase *base) {
  static void *domain; /* one for all sessions: they keep no copy */
  api = base->get_api(API_VERSION);
  if (!domain) {
    CHECK(API(CREATE_CUSTOM_OP_DOMAIN, Status(*)(const char *, void **))("promptmill", &domain));
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
      CHECK(API(CUSTOM_OP_DOMAIN_ADD, Status(*)(void *, const Op *))(domain, &operators[i].op));
    }
  }
  return API(ADD_CUSTOM_OP_DOMAIN, Status(*)(void *, void *))(options, domain);
}
