/* The one contract of all kernel libraries (native/cpu, native/cuda): plain C, raw pointers, no torch, no exceptions.
 *
 * Owns the argument structs and what they mean. Never allocates for the caller and never keeps a pointer after a call returned
 * (CUDA: after the work queued on `stream` ended). Invariant: a struct begins with its own size and the version of this contract;
 * a library refuses what it does not know, with a sentence, before it touches any memory.
 *
 * Strides are in bytes, positions in tokens. Counts of heads, rows and tokens are at most 2^31 - 1, so that negative ones are
 * refused. Along the head dimension elements are contiguous, everywhere.
 *
 * Every function returns KVK_OK or another kvk_status; kvk_last_error() then has the calling thread's sentence. */
#ifndef KVK_KERNELS_H
#define KVK_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVK_ABI 2u
#define KVK_EXPORT __attribute__((visibility("default")))

enum kvk_status {
  KVK_OK = 0,
  KVK_INVALID = 1,     /* an argument is out of its bounds, or the struct is of another version */
  KVK_UNSUPPORTED = 2, /* right, but not by this library or on this machine */
  KVK_WORKSPACE = 3,   /* the workspace is too small */
  KVK_RANGE = 4,       /* a value to quantise is not finite or beyond fp16; what was written is of no use */
  KVK_DEVICE = 5       /* CUDA refused; the text is its own */
};

/* How elements of K and V are held. Quantised: asymmetric, x = code * scale + zero, scale and zero in fp16; codes 0..255 one a
 * byte, or 0..15 two a byte, the even element of a row in the low half (KIVI: K has one scale per channel and group of tokens,
 * V one per token). */
enum kvk_codec { KVK_F32 = 0, KVK_F16 = 1, KVK_BF16 = 2, KVK_INT8 = 3, KVK_INT4 = 4 };

/* Which two elements of a head are turned together: i and i + r/2, or 2i and 2i + 1, of the first r (`rotary_dim`). */
enum kvk_rope { KVK_ROPE_HALF = 0, KVK_ROPE_INTERLEAVED = 1 };

#define KVK_MAX_HEAD_DIM 512u
#define KVK_MAX_GROUP 128u /* tokens that share a scale of K: 32, 64 or 128 */
#define KVK_MAX_GQA 128u   /* query heads to one head of K and V */

/* Tokens that lie together: a block of the store or a part of one, or the tail that grows. All pointers are those of the block's
 * first token and head; `first` tokens are passed over, so that a part of a quantised block keeps the groups of the whole. */
struct kvk_segment {
  const void* k;
  const void* v;
  int64_t k_head_stride, k_token_stride;
  int64_t v_head_stride, v_token_stride;
  const uint16_t* k_scale; /* [head][group of the block][head_dim], fp16; scales: quantised only */
  const uint16_t* k_zero;  /* the same */
  const uint16_t* v_scale; /* [head][token of the block], fp16 */
  const uint16_t* v_zero;
  int64_t k_scale_head_stride, v_scale_head_stride;
  /* K was rotated for base_position, and stands at new_position now (both of the first token used). Where they differ and
   * the model rotates K, `turn` holds cos, then sin, rotary_dim / 2 each, of (new - base) * inv_freq: the query is turned
   * back by it instead of K forward. NULL: K needs no turning. */
  const float* turn;
  int64_t base_position, new_position;
  uint32_t first, tokens;
  uint32_t codec;   /* kvk_codec */
  uint32_t k_group; /* quantised: tokens that share a scale of K */
};

/* What the queries of one batch row attend to: segments, then a tail in model dtype (tokens = 0: none). */
struct kvk_sequence {
  const struct kvk_segment* segments;
  uint64_t count;
  struct kvk_segment tail;
};

struct kvk_attention {
  uint32_t size, abi; /* sizeof(struct kvk_attention), KVK_ABI */
  uint32_t batch, query_heads, kv_heads, head_dim;
  uint32_t query_tokens; /* per row; any number */
  uint32_t dtype;        /* of q and out: KVK_F32, KVK_F16, KVK_BF16 */
  const void* q;
  int64_t q_batch_stride, q_head_stride, q_token_stride;
  void* out;
  int64_t out_batch_stride, out_head_stride, out_token_stride;
  float* lse;                /* [batch][query_heads][query_tokens]: log of the sum of exponentials, the sink included; or NULL */
  const int64_t* q_position; /* [batch][query_tokens] */
  const struct kvk_sequence* sequences; /* [batch] */
  const float* sinks;                   /* [query_heads]: one more logit each, that has no value; or NULL */
  float scale;                          /* of the scores */
  float softcap;                        /* scores become softcap * tanh(score / softcap); 0: not */
  uint32_t causal;                      /* 1: a key is seen by queries of its own and later positions */
  uint32_t window;                      /* a key is seen by queries less than `window` positions behind it; 0: all */
  uint32_t rope, rotary_dim;            /* how `turn` applies; rotary_dim even, at most head_dim */
  uint32_t threads; /* CPU: so many work on it at most, the caller's too. CUDA: so many stretches of keys at most; 0 chooses */
  uint32_t path;    /* kvk_cpu_path, kvk_cuda_path; 0 chooses */
  void* workspace;  /* CUDA: the device's, zeros before its first use; calls that may overlap need one each */
  uint64_t workspace_bytes;
  void* stream; /* CUDA; NULL elsewhere */
};
/* A query that sees no key gives zeros, and -infinity as its LSE. On CUDA every pointer in it is the device's, those in
 * sequences and segments too (see kvk_cuda_table), and what they point to is read when the kernel runs: a captured call may be
 * replayed after q_position, a tail's `tokens` or a whole table were written anew.
 *
 * What is no number: K of a key that a query does not see never matters to it. V does, being multiplied by a weight of 0, where
 * another query of the call sees that key: infinity or NaN there may make an earlier query's output NaN (torch's SDPA lets both
 * through, of K and V, always). Keys outside of the segments and the tail, as padding or the unwritten rest of a buffer, are
 * not read. */

/* K or V of one layer of one block, to quantise or to bring back; `elements` is the side in kvk_codec `dtype`. */
struct kvk_conversion {
  uint32_t size, abi;
  uint32_t heads, tokens, head_dim;
  uint32_t dtype; /* of elements: KVK_F32, KVK_F16, KVK_BF16 */
  uint32_t codec; /* of codes: KVK_INT8, KVK_INT4 (head_dim even) */
  uint32_t group; /* K: tokens that share a scale, 32, 64 or 128, the last group may have fewer; V: 0, one scale a token */
  void* elements;
  int64_t head_stride, token_stride;
  void* codes;
  int64_t codes_head_stride, codes_token_stride;
  uint16_t* scale; /* K: [head][group][head_dim], V: [head][token]; fp16 */
  uint16_t* zero;  /* the same */
  int64_t scale_head_stride;
  uint32_t path; /* CPU: kvk_cpu_path; CUDA: KVK_CPU_REFERENCE for the naive kernel, else 0 */
  void* stream;
  uint32_t* status; /* CUDA, quantising: becomes KVK_RANGE, on the device, if a value cannot be held; NULL: not said */
};
/* Quantising, of the values that share a scale: zero is their minimum rounded down to fp16, scale (maximum - zero) / 255 or 15
 * rounded up, code the nearest whole number to (x - zero) / scale in fp32, half to even; codes are 0 where scale is. So what
 * comes back, at most 65504, differs from x by at most scale / 2 and what fp32 rounds off on both ways: a unit in the last place
 * of code * scale and one of what comes back; then it is rounded to `dtype`. Every path writes the same bytes. */

/* Turns K in place or into other memory: out = R(turn) in, over all heads and tokens; elements beyond rotary_dim are
 * copied. */
struct kvk_rotation {
  uint32_t size, abi;
  uint32_t heads, tokens, head_dim, dtype, rope, rotary_dim;
  const void* in;
  int64_t in_head_stride, in_token_stride;
  void* out;
  int64_t out_head_stride, out_token_stride;
  const float* turn; /* cos, then sin, rotary_dim / 2 each */
  uint32_t path;     /* as in kvk_conversion */
  void* stream;
};

/* What follows is the CUDA library's alone. Lists are arrays that the device reads, so they and what they point to are
 * device memory or registered host memory; `path` is as in kvk_conversion. */

/* The segments of one layer, dequantised, turned forward by `turn`, into a dense cache: one launch. */
struct kvk_loading {
  uint32_t size, abi;
  uint32_t heads, head_dim, dtype, rope, rotary_dim;
  uint32_t count;       /* segments */
  uint32_t most_tokens; /* no segment has more */
  uint32_t path;
  const struct kvk_segment* segments; /* [count]; their positions are not looked at */
  const int64_t* places;              /* [count]: bytes from k, and from v, to the segment's first token */
  void* k;
  void* v;
  int64_t head_stride, token_stride; /* of both */
  void* stream;
};

/* How far what is stored is from what was computed, per token of K and of V, over all heads and elements: one launch. */
struct kvk_scoring {
  uint32_t size, abi;
  uint32_t heads, head_dim, dtype, rope, rotary_dim;
  uint32_t count;
  uint32_t most_tokens;
  uint32_t path;
  const struct kvk_segment* segments; /* [count] */
  const int64_t* columns;             /* [count]: the token of k, v, square and norm that is the segment's first */
  const void* k;                      /* computed; [heads, tokens, head_dim] */
  const void* v;
  int64_t head_stride, token_stride;
  float* square; /* [2][tokens]: sums of (stored - computed)^2 */
  float* norm;   /* [2][tokens]: sums of computed^2 */
  uint64_t tokens;
  void* stream;
};

/* `count` pages, each [heads, tokens] rows of `row_bytes`, from one place to another: one launch, in either direction between
 * registered host memory and the device. */
struct kvk_pages {
  uint32_t size, abi;
  uint32_t count, heads, tokens, row_bytes;
  uint32_t blocks; /* at most so many blocks of threads; 0: as many as help */
  uint32_t path;
  const void* const* from; /* [count] */
  void* const* to;         /* [count] */
  int64_t from_head_stride, from_token_stride, to_head_stride, to_token_stride;
  void* stream;
};

#define KVK_AWQ_ROWS 64u     /* of x, at most, in kvk_awq_multiply() */
#define KVK_CPU_AWQ_ROWS 48u /* the same, of the CPU */

/* How a layer's words lie for the CPU. Panels: tiles of KVK_AWQ_TILE_INPUTS inputs by KVK_AWQ_PANEL_WORDS words, those of the
 * first inputs first; in a tile the words of an input lie one behind the other, and so do the inputs. The last tiles of either
 * side are smaller, so that both orders have the same size. A word is the same in both. */
enum kvk_awq_order { KVK_AWQ_CHECKPOINT = 0, KVK_AWQ_PANELS = 1 };
#define KVK_AWQ_TILE_INPUTS 128u
#define KVK_AWQ_PANEL_WORDS 16u

/* A linear layer's weights of an AWQ "gemm" checkpoint: w[k][n] = (q - z) * s, four bits, groups along k. `words` as they are
 * in the checkpoint, or as kvk_awq_repack() has put them; both take the same bytes. */
struct kvk_awq {
  uint32_t size, abi;
  uint32_t inputs, outputs, group; /* outputs a multiple of 16, inputs of group, group of 64 */
  uint32_t dtype;                  /* of x, bias, out and what is dequantised: KVK_F16 or KVK_BF16 */
  uint32_t path;                   /* KVK_CPU_REFERENCE: the naive kernel, which wants the checkpoint's words */
  uint32_t rows;                   /* of x */
  const uint32_t* words;           /* [inputs][outputs / 8], or the same bytes repacked */
  const uint32_t* zeros;           /* [inputs / group][outputs / 8] */
  const uint16_t* scales;          /* [inputs / group][outputs], fp16 */
  const void* x;                   /* [rows][inputs]; 16-byte aligned */
  const void* bias;                /* [outputs], or NULL */
  void* out; /* multiply: [rows][outputs]; dequantise: [outputs][inputs]; repack: the words, not those given */
  int64_t x_row_stride, out_row_stride;
  void* stream;
  uint32_t threads; /* CPU: at most so many work on it */
  uint32_t columns; /* CPU, dequantise: so many, from where words, zeros and scales point to: multiples of 8 */
  uint32_t order;   /* CPU: a kvk_awq_order; of panels the group divides KVK_AWQ_TILE_INPUTS */
  uint32_t first;   /* CPU, dequantise, panels: the first column, a multiple of 8; `words` then points to the whole layer's */
};
/* On the CPU words are never repacked; outputs a multiple of 8, any group that divides inputs; zeros may be NULL:
 * all of them are 8. kvk_awq_multiply(): x, bias and out in f32, up to KVK_CPU_AWQ_ROWS rows; dtype KVK_BF16 instead of KVK_F32
 * says that x holds values of bf16, of which a path may keep 14 bits below the largest of 128. kvk_awq_dequantise(): to
 * [inputs][columns] of f32, f16 or bf16, a row every out_row_stride bytes; `outputs` is still the whole layer's, as its rows of
 * words lie. No repack. */

/* A linear layer in fp32 or bf16, on the CPU: out[m][n] = sum of x[m][k] * w[n][k], + bias[n]. With `up`, the gated half of an
 * MLP: out = silu(x w + bias) * (x up + up_bias). All are of `dtype`; sums are fp32, and what has a name of its own in torch
 * (both products, silu, what comes out) is rounded to `dtype`. An element has the same bits whatever rows stand beside its own
 * and however many threads work: they depend on its row, its weights and the path. KVK_ROUNDED: x is bf16, all else f32, and w
 * counts as rounded to bf16; not with `up`. */
#define KVK_ROUNDED 5u /* beside kvk_codec's */
struct kvk_linear {
  uint32_t size, abi;
  uint32_t inputs, outputs, rows; /* inputs a multiple of 16 */
  uint32_t dtype;                 /* KVK_F32, KVK_BF16 or KVK_ROUNDED */
  uint32_t path, threads;
  const void *x, *w, *up;               /* [rows][inputs]; [outputs][inputs]; the same, or NULL */
  const void *bias, *up_bias;           /* [outputs], or NULL */
  void* out;                            /* [rows][outputs] */
  int64_t x_row_stride, out_row_stride; /* in elements */
};

/* out[m][i] = weight[i] * (x[m][i] / sqrt(mean of the squares of x[m] + epsilon)), on the CPU: computed in fp32, both products
 * rounded to `dtype`. */
struct kvk_norm {
  uint32_t size, abi;
  uint32_t rows, width, dtype, path, threads; /* KVK_F32 or KVK_BF16 */
  const void *x, *weight;
  void* out;                            /* may be x */
  int64_t x_row_stride, out_row_stride; /* in elements */
  float epsilon;
};

/* Queries and keys of tokens, turned to their positions in place, on the CPU: of each head x, x * cos + half(x) * sin, where
 * half(x) is x's second half, negated, and then its first. Each product and sum is rounded to `dtype`. */
struct kvk_turns {
  uint32_t size, abi;
  uint32_t rows, query_heads, kv_heads, head_dim, dtype, path, threads; /* head_dim a multiple of 32; KVK_F32 or KVK_BF16 */
  void *q, *k;                                                          /* [rows][heads][head_dim] */
  const void *cos, *sin;                                                /* [rows][head_dim] */
};

#define KVK_PRODUCT_ROWS 16u /* of x, at most, in kvk_multiply() */

/* A few rows times a matrix of numbers as they lie, out = x w^T: the CPU's. Weights stay in 16 bits until they are multiplied. */
struct kvk_product {
  uint32_t size, abi;
  uint32_t inputs, outputs, rows;
  uint32_t dtype; /* of the weights: KVK_F16 or KVK_BF16 */
  uint32_t path, threads;
  const void* weights; /* [outputs][inputs], a row every weight_row_stride bytes */
  const void* x;       /* [rows][inputs], f32 */
  void* out;           /* [rows][outputs], f32 */
  int64_t weight_row_stride, x_row_stride, out_row_stride;
};

/* Weights of one product of a decoder layer: numbers as kvk_linear has them, or words as kvk_awq. */
struct kvk_weights {
  uint32_t inputs, outputs, group, order; /* group: of words; 0: numbers */
  const void* values;                     /* numbers or words */
  const void* bias;                       /* of the layer's dtype, behind words f32; or NULL */
  const uint32_t* zeros;                  /* of words, as the next */
  const uint16_t* scales;
};

/* The part of a decoder layer before its attention, on the CPU, of up to KVK_CPU_AWQ_ROWS rows: its norm, queries, keys and
 * values, norms of their heads, and their turning. As the calls for each would compute it, to the bit. */
struct kvk_layer_in {
  uint32_t size, abi;
  uint32_t rows, head_dim, dtype, path, threads; /* KVK_F32 or KVK_BF16 */
  float epsilon, query_epsilon, key_epsilon;
  const void *x, *norm;              /* [rows][inputs]; [inputs] */
  const void *query_norm, *key_norm; /* [head_dim], or both NULL */
  const void *cos, *sin;             /* [rows][head_dim], or both NULL: nothing is turned */
  void *q, *k, *v;                   /* [rows][outputs] */
  void* workspace;
  uint64_t workspace_bytes;
  struct kvk_weights query, key, value;
};

/* The part behind it: middle = residual + factor * (attended times out), result = middle + factor * MLP(norm(middle)), each
 * product, sum and norm rounded to `dtype`. */
struct kvk_layer_out {
  uint32_t size, abi;
  uint32_t rows, dtype, path, threads;
  float epsilon, factor;
  const void *attended, *residual, *norm; /* [rows][inputs of out]; [rows][outputs of out]; [outputs of out] */
  void *middle, *result;                  /* as residual */
  void* workspace;
  uint64_t workspace_bytes;
  struct kvk_weights out, gate, up, down;
};

KVK_EXPORT uint32_t kvk_abi(void);
KVK_EXPORT const char* kvk_last_error(void);

/* Bytes kvk_attend() wants as workspace for these arguments; 0 and an error if they are wrong. */
KVK_EXPORT uint64_t kvk_attention_workspace(const struct kvk_attention* args);
KVK_EXPORT int kvk_attend(const struct kvk_attention* args);
KVK_EXPORT int kvk_quantise(const struct kvk_conversion* args);
KVK_EXPORT int kvk_dequantise(const struct kvk_conversion* args);
KVK_EXPORT int kvk_rotate(const struct kvk_rotation* args);
/* turn[0..half) = cos(delta * inv_freq[i]), turn[half..2 half) = sin of the same, computed in double. */
KVK_EXPORT void kvk_turn(const float* inv_freq, uint32_t half, int64_t delta, float* turn);

KVK_EXPORT int kvk_load(const struct kvk_loading* args);
KVK_EXPORT int kvk_score(const struct kvk_scoring* args);
KVK_EXPORT int kvk_copy_pages(const struct kvk_pages* args);
KVK_EXPORT int kvk_awq_repack(const struct kvk_awq* args);
KVK_EXPORT int kvk_awq_multiply(const struct kvk_awq* args);
KVK_EXPORT int kvk_awq_dequantise(const struct kvk_awq* args);
KVK_EXPORT int kvk_linear_multiply(const struct kvk_linear* args);
KVK_EXPORT int kvk_norm_rows(const struct kvk_norm* args);
KVK_EXPORT int kvk_turn_rows(const struct kvk_turns* args);
KVK_EXPORT int kvk_multiply(const struct kvk_product* args);
/* Bytes that the two calls want as workspace; 0 and an error if the arguments are wrong. */
KVK_EXPORT uint64_t kvk_layer_in_workspace(const struct kvk_layer_in* args);
KVK_EXPORT uint64_t kvk_layer_out_workspace(const struct kvk_layer_out* args);
KVK_EXPORT int kvk_layer_before(const struct kvk_layer_in* args);
KVK_EXPORT int kvk_layer_behind(const struct kvk_layer_out* args);
/* `count` layers one behind the other, each before, attention, behind: one query of each of the attention's batch, whose K and V
 * are written as its tail's last token. A workspace too small for the attention is found out in the first layer. */
KVK_EXPORT int kvk_layers(const struct kvk_layer_in* before, const struct kvk_attention* attention,
                          const struct kvk_layer_out* behind, uint32_t count);

/* The transfer path. Streams and events are CUDA's own, as pointers. Registering makes host memory known to the device, at the
 * same address, until it is unregistered; KVK_UNSUPPORTED: not this memory on this device, which a pinned buffer between is
 * for. read_only: the map may not be written. */
KVK_EXPORT int kvk_host_register(const void* memory, uint64_t bytes, uint32_t read_only);
KVK_EXPORT int kvk_host_unregister(const void* memory);
KVK_EXPORT int kvk_host_allocate(uint64_t bytes, void** memory); /* pinned */
KVK_EXPORT int kvk_host_free(void* memory);
/* `count` copies, in the stream's order, between pinned host memory and the device. */
KVK_EXPORT int kvk_copy(void* const* to, const void* const* from, const uint64_t* bytes, uint64_t count, void* stream);
KVK_EXPORT int kvk_stream_create(void** stream);
KVK_EXPORT int kvk_stream_destroy(void* stream);
KVK_EXPORT int kvk_event_create(void** event);
KVK_EXPORT int kvk_event_destroy(void* event);
KVK_EXPORT int kvk_event_record(void* event, void* stream);
KVK_EXPORT int kvk_event_wait(void* event, void* stream); /* the stream's later work waits; the caller does not */
KVK_EXPORT int kvk_event_synchronise(void* event);        /* the caller waits */

/* The CPU library's ways to compute. `reference` is the naive kernel the others are measured against; `avx512` needs F, BW,
 * DQ and VL, `avx512_vnni` also VNNI and BF16, `avx512_fp16` also AVX512-FP16, `amx` also TILE, BF16 and INT8 of AMX, and the
 * kernel's permission, which kvk_cpu_lacks() asks for. `auto` is what KVK_CPU_PATH names in the environment, or the last that
 * this machine can run. */
enum kvk_cpu_path {
  KVK_CPU_AUTO = 0,
  KVK_CPU_REFERENCE = 1,
  KVK_CPU_AVX2 = 2,
  KVK_CPU_AVX512 = 3,
  KVK_CPU_AVX512_VNNI = 4,
  KVK_CPU_AVX512_FP16 = 5,
  KVK_CPU_AMX = 6
};
/* The path that `auto` stands for; KVK_CPU_AUTO if KVK_CPU_PATH names none that can run here: kvk_cpu_lacks(KVK_CPU_AUTO) says
 * why, and so does every call that leaves the path to `auto`. */
KVK_EXPORT uint32_t kvk_cpu_auto(void);
/* NULL if this machine can run `path`, else a sentence that says what it lacks. */
KVK_EXPORT const char* kvk_cpu_lacks(uint32_t path);

/* The CUDA library's ways: the naive kernel; tiles of 16 rows, every warp its own keys; tiles of many rows. */
enum kvk_cuda_path { KVK_CUDA_AUTO = 0, KVK_CUDA_REFERENCE = 1, KVK_CUDA_DECODE = 2, KVK_CUDA_PREFILL = 3 };
/* Lays out sequences and their segments in one piece, as a device reads them. `args` is the call as it will be, but for
 * `sequences`, which the host reads here (K, V, scales and turns in it are the device's; the segments are checked). `table`
 * is host memory of `bytes`; it belongs at the address `device` of the device, and that is what kvk_attend() gets as
 * `sequences`. Row b is the b-th kvk_sequence of the table: a tail that grows is its tail.tokens. Returns the table's size (with
 * table = NULL nothing else), or 0 and an error. */
KVK_EXPORT uint64_t kvk_cuda_table(const struct kvk_attention* args, void* table, uint64_t bytes, uint64_t device);
/* NULL if it can run on that device of this process, else a sentence that says what is lacking. */
KVK_EXPORT const char* kvk_cuda_lacks(int device);

#ifdef __cplusplus
}
#endif

#endif
