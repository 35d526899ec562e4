/* kvstored.h: the store for programs that are not Python. Plain C, C99; docs/c-api.md has an example.
 *
 * Errors. Every function that can fail returns a kvs_status. kvs_last_error() has the text for the thread that called:
 * it names the value and the limit, and is valid until that thread's next call. A key that is not there is no error.
 * Threads. Every function may be called from any thread, on the same objects at the same time, except: one layer of one
 * block is filled by one thread, and an object must not be freed while another thread uses it.
 * Waiting. "Waits for nothing" means that nobody is asked. "Reads shared memory" means the same, but where the daemon has begun
 * anew since, or a key is changed again and again meanwhile: then it is asked. "Asks the daemon" means a message and its answer,
 * within the client's timeout_s; of more than 1,024 keys several; where the daemon has begun anew also an attachment, and both
 * again, three times at most, if it begins anew once more meanwhile.
 * Ownership. What a *_free function takes is the caller's. Memory that a function points to belongs to the store, and is valid
 * as long as its note says. NULL may be freed.
 * Forking. A child calls kvs_after_fork() first, for each client, and uses none of its parent's blocks and writers. */
#ifndef KVSTORED_KVSTORED_H
#define KVSTORED_KVSTORED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

#define KVS_API_VERSION 1
#define KVS_KEY_BYTES 32

typedef enum kvs_status {
  KVS_OK = 0,
  KVS_INVALID_ARGUMENT = 1,
  KVS_NO_SPACE = 2,
  KVS_NOT_PERMITTED = 3,
  KVS_PINS_EXHAUSTED = 4,
  KVS_DEADLINE_EXCEEDED = 5,
  KVS_BLOCK_LOST = 6, /* the block's writer ended, or the store forgot it */
  KVS_CLOSED = 7,
  KVS_INCOMPATIBLE_VERSION = 8,
  KVS_UNAVAILABLE = 9, /* no daemon can be reached; of kvs_push: not that host */
  KVS_INTERNAL = 10    /* out of memory, or a mistake of this library */
} kvs_status;

typedef enum kvs_presence { KVS_MISSING = 0, KVS_PENDING = 1, KVS_RESIDENT = 2, KVS_ON_DISK = 3 } kvs_presence;

/* What kvs_create says of each key. PENDING: another client is writing it. */
typedef enum kvs_grant { KVS_GRANTED = 0, KVS_EXISTS = 1, KVS_BEING_WRITTEN = 2, KVS_GRANT_NO_SPACE = 3 } kvs_grant;

typedef enum kvs_dtype { KVS_UINT8 = 0, KVS_FLOAT16 = 1, KVS_BFLOAT16 = 2, KVS_FLOAT32 = 3, KVS_INT8 = 4 } kvs_dtype;

/* A digest, as SHA-256's: bytes that are spread evenly. The index has room for 448 keys, no more, that share bytes 4 to 7, and
 * says KVS_GRANT_NO_SPACE of the next; numbers and names are to be hashed. */
typedef union kvs_key {
  uint8_t bytes[KVS_KEY_BYTES];
  uint64_t words[4]; /* keys lie on multiples of 8 */
} kvs_key;

typedef struct kvs_client kvs_client; /* a session with one namespace of a daemon */
typedef struct kvs_blocks kvs_blocks; /* the blocks one kvs_get pinned */
typedef struct kvs_writer kvs_writer; /* the blocks one kvs_create granted */
typedef struct kvs_region kvs_region; /* memory of the pool for an allocator of the caller's own */

/* A stretch of memory. */
typedef struct kvs_span {
  void* data;
  uint64_t length;
} kvs_span;

typedef struct kvs_const_span {
  const void* data;
  uint64_t length;
} kvs_const_span;

/* Set it up with kvs_default_options(), which also leaves room for what later versions add. */
typedef struct kvs_options {
  uint32_t struct_bytes;      /* sizeof(kvs_options) as the caller knows it */
  uint32_t max_pins;          /* 1 to 1048576; blocks that the client may hold at a time */
  double timeout_s;           /* above 0, at most 3600; of every question to the daemon */
  const char* directory;      /* of the daemon; NULL: $KVSTORED_DIR, or /run/kvstored */
  const char* namespace_name; /* 1 to 63 bytes */
  int32_t read_only;
} kvs_options;

/* How a block of up to block_tokens tokens is arranged: per layer kv_per_layer * num_kv_heads * head_dim elements a token, or
 * layer_bytes_per_token[layer] bytes where that is not NULL. Layers begin on multiples of 512 bytes. */
typedef struct kvs_layout {
  uint32_t num_layers;   /* 1 to 512 */
  uint32_t kv_per_layer; /* 1 or 2 */
  uint32_t num_kv_heads;
  uint32_t head_dim;
  uint32_t dtype; /* a kvs_dtype */
  uint32_t block_tokens;
  uint32_t meta_fixed; /* bytes of the client's own beside the layers: meta_fixed + tokens * meta_per_token */
  uint32_t meta_per_token;
  const uint32_t* layer_bytes_per_token; /* num_layers of them, or NULL; read during the call */
} kvs_layout;

/* Flags of kvs_get. */
#define KVS_FOLLOW 1u /* also blocks that are still being written; kvs_blocks_wait_layer waits for their layers */
#define KVS_VERIFY 2u /* a block whose bytes do not match their checksums is a miss */

/* ---- the library. Waits for nothing. */

uint32_t kvs_api_version(void);                 /* KVS_API_VERSION of the library that was loaded */
const char* kvs_status_name(kvs_status status); /* "INVALID_ARGUMENT"; never NULL, valid for ever */
const char* kvs_last_error(void);               /* this thread's; "" if its last call did not fail */
void kvs_default_options(kvs_options* options);

/* ---- a client */

/* Attaches to the daemon. Asks the daemon. The client is the caller's: kvs_close. */
kvs_status kvs_connect(const kvs_options* options, kvs_client** client);
/* Ends the session and frees the client: what is unsealed is given up. Blocks that are pinned stay readable. Asks the daemon. */
void kvs_close(kvs_client* client);
/* In a forked child, before anything else with this client. Waits for nothing. */
void kvs_after_fork(kvs_client* client);
/* The id of a layout, the same for an equal one, also after the daemon restarted. Asks the daemon. */
kvs_status kvs_register_layout(kvs_client* client, const kvs_layout* layout, uint32_t* layout_id);
/* The figures of the namespace as JSON. The text is the caller's: kvs_free_text. Asks the daemon. */
kvs_status kvs_stats(kvs_client* client, char** text);
void kvs_free_text(char* text); /* Waits for nothing. */

/* ---- reading */

/* Where each block is: a kvs_presence each into states[0..count), which is the caller's. Reads shared memory. */
kvs_status kvs_lookup(kvs_client* client, const kvs_key* keys, size_t count, uint8_t* states);
/* Pins the blocks that are there. What is not is a miss: kvs_blocks_hit tells. With wait_s above 0 what lies on disk is loaded
 * and what others write is waited for, that long at most; with 0 it reads shared memory. What KVS_VERIFY finds wrong the daemon
 * is told of, and asked. The blocks are the caller's: kvs_blocks_free. */
kvs_status kvs_get(kvs_client* client, const kvs_key* keys, size_t count, uint32_t flags, double wait_s, kvs_blocks** blocks);
/* Gives the pins back: no memory of these blocks may be touched after it. Waits for nothing. */
void kvs_blocks_free(kvs_blocks* blocks);
size_t kvs_blocks_count(const kvs_blocks* blocks); /* Waits for nothing. */
/* 1: block i is pinned, 0: it is a miss, -1: the client holds its max_pins, or there is no such i. Waits for nothing. */
int kvs_blocks_hit(const kvs_blocks* blocks, size_t i);
/* One layer of a pinned block, readable until kvs_blocks_free. Of a followed block only what is there. Waits for nothing. */
kvs_status kvs_blocks_layer(const kvs_blocks* blocks, size_t i, uint32_t layer, kvs_const_span* bytes);
/* The same layer of all blocks, in order: address and length of each; a miss has data NULL and length 0. It fails where
 * kvs_blocks_layer of one would. layers[0..kvs_blocks_count). Waits for nothing: kvs_blocks_wait_layers does. */
kvs_status kvs_blocks_layers(const kvs_blocks* blocks, uint32_t layer, kvs_const_span* layers);
/* The client's own bytes beside the layers; of a followed block once its last layer is there. Waits for nothing. */
kvs_status kvs_blocks_meta(const kvs_blocks* blocks, size_t i, kvs_const_span* bytes);
/* How many tokens block i has; 0 for a miss. Waits for nothing. */
uint32_t kvs_blocks_tokens(const kvs_blocks* blocks, size_t i);
/* How many leading layers of a followed block are there: all of a sealed one, 0 of a miss. Waits for nothing. */
uint32_t kvs_blocks_layers_ready(const kvs_blocks* blocks, size_t i);
/* 1: all of block i is there, and sealed; 0: not yet, or it is a miss. Waits for nothing. */
int kvs_blocks_sealed(const kvs_blocks* blocks, size_t i);
/* Waits until that layer of a followed block is there, timeout_s at most. KVS_BLOCK_LOST: its writer ended. */
kvs_status kvs_blocks_wait_layer(const kvs_blocks* blocks, size_t i, uint32_t layer, double timeout_s);
/* Waits until that layer of all blocks that are no misses is there, timeout_s at most for all together. */
kvs_status kvs_blocks_wait_layers(const kvs_blocks* blocks, uint32_t layer, double timeout_s);
/* Has blocks that lie on disk loaded and does not wait for them. How many are in memory or on their way. Asks the daemon. */
kvs_status kvs_prefetch(kvs_client* client, const kvs_key* keys, size_t count, uint32_t priority, size_t* coming);
/* Has another host come for blocks before anybody asks for them there, layer by layer also while they are written; `to` is its
 * node. How many of the keys it is told. KVS_UNAVAILABLE: it is not connected, or takes nothing (docs/hosts.md), the text names
 * those that do. Asks the daemon. */
kvs_status kvs_push(kvs_client* client, const kvs_key* keys, size_t count, const char* to, size_t* told);

/* ---- writing */

/* Claims the keys. token_counts: of each block, or NULL for full ones. priority: 0 to 100, 35 is usual; of two blocks used
 * alike the lower goes first. ttl_s: seconds to live, 0 for ever. Asks the daemon. The writer is the caller's:
 * kvs_writer_free. */
kvs_status kvs_create(kvs_client* client, const kvs_key* keys, size_t count, uint32_t layout_id, const uint32_t* token_counts,
                      uint32_t priority, uint32_t ttl_s, kvs_writer** writer);
/* Gives up what is still open, and frees the writer. Asks the daemon if something is open. */
void kvs_writer_free(kvs_writer* writer);
size_t kvs_writer_count(const kvs_writer* writer); /* Waits for nothing. */
/* A kvs_grant; -1 if there is no such i. Waits for nothing. */
int kvs_writer_grant(const kvs_writer* writer, size_t i);
/* One layer of a granted block to be filled, until it is sealed or aborted. Waits for nothing. */
kvs_status kvs_writer_layer(kvs_writer* writer, size_t i, uint32_t layer, kvs_span* bytes);
/* The client's own bytes. Waits for nothing. */
kvs_status kvs_writer_meta(kvs_writer* writer, size_t i, kvs_span* bytes);
/* Copies one layer in, with its checksum on the way. length: just the layer's. Waits for nothing. */
kvs_status kvs_writer_copy_layer(kvs_writer* writer, size_t i, uint32_t layer, const void* source, uint64_t length);
/* Shows that layer to followers; layers go in order, each once. Waits for nothing. */
kvs_status kvs_writer_mark_layer(kvs_writer* writer, size_t i, uint32_t layer);
/* Publishes block i, KVS_ALL: all that are open. A block with layers nobody asked for is refused, and nothing is sealed, unless
 * zero_rest makes them zeros. KVS_BLOCK_LOST: some were no longer ours, the others are sealed. Asks the daemon. */
#define KVS_ALL ((size_t)-1)
kvs_status kvs_writer_seal(kvs_writer* writer, size_t i, int zero_rest);
/* Gives block i up, KVS_ALL: all that are open. Promises that nothing writes to it any more. Asks the daemon. */
kvs_status kvs_writer_abort(kvs_writer* writer, size_t i);
/* Waits until the blocks others write are sealed or granted to us, timeout_s at most. */
kvs_status kvs_writer_wait_pending(kvs_writer* writer, double timeout_s);

/* ---- regions: blocks out of memory that the caller's own allocator divides */

/* Where a piece of a block lies in a region. */
typedef struct kvs_buffer {
  uint64_t offset; /* a multiple of KVS_REGION_ALIGNMENT */
  uint64_t length;
} kvs_buffer;
#define KVS_REGION_ALIGNMENT 64

/* The order of a block's buffers: row by row of sizes[0] * sizes[1] * sizes[2], axes[] says what each counts. With
 * {{layers, 2, 1}, {KVS_AXIS_LAYER, KVS_AXIS_KV, KVS_AXIS_PART}} buffer 2 * l is the K of layer l, buffer 2 * l + 1 its V. A
 * layer's bytes are its buffers in the order kv, part. */
typedef enum kvs_axis { KVS_AXIS_LAYER = 0, KVS_AXIS_KV = 1, KVS_AXIS_PART = 2 } kvs_axis;
typedef struct kvs_buffer_shape {
  uint32_t sizes[3];
  uint32_t axes[3]; /* a kvs_axis each, every one once */
} kvs_buffer_shape;

/* What became of one block: sealed; open, its other layers are awaited; EXISTS, PENDING and NO_SPACE as kvs_create says it; lost,
 * its layers of before are gone with a daemon; refused: kvs_region_refusal says why. */
typedef enum kvs_registered {
  KVS_SEALED = 0,
  KVS_OPEN = 1,
  KVS_REGION_EXISTS = 2,
  KVS_REGION_PENDING = 3,
  KVS_REGION_NO_SPACE = 4,
  KVS_LOST = 5,
  KVS_REFUSED = 6
} kvs_registered;

/* Memory of the pool in one piece, which nobody else is given to write to. KVS_NO_SPACE: no such piece is free. Asks the daemon.
 * The region is the caller's: kvs_region_free, before kvs_close. Calls of several threads about one region run one after the
 * other, and wait for each other; not so kvs_region_memory and kvs_region_refusal. */
kvs_status kvs_register_region(kvs_client* client, uint64_t length, kvs_region** region);
/* Gives the memory back, and blocks that are open up; sealed blocks stay. Promises that nothing writes to it any more. Asks the
 * daemon. */
void kvs_region_free(kvs_region* region);
/* The memory, until kvs_region_free. Waits for nothing. */
kvs_status kvs_region_memory(kvs_region* region, kvs_span* bytes);
/* Publishes a block for each key by copying its buffers, of which there are sizes[0] * sizes[1] * sizes[2] for each, one block
 * after the other. They hold the layers from layer_index on; where a block has more it stays open until the others were given.
 * results[0..count): a kvs_registered each; an item that is refused changes no other. token_counts, priority, ttl_s: as
 * kvs_create. Asks the daemon. */
kvs_status kvs_region_put(kvs_region* region, const kvs_key* keys, size_t count, uint32_t layout_id,
                          const kvs_buffer_shape* shape, const kvs_buffer* buffers, uint32_t layer_index,
                          const uint32_t* token_counts, uint32_t priority, uint32_t ttl_s, uint8_t* results);
typedef enum kvs_loaded {
  KVS_LOADED = 0,
  KVS_LOAD_MISSING = 1, /* it was not found */
  KVS_LOAD_PENDING = 2, /* of a followed block: these layers are not all there */
  KVS_LOAD_CORRUPT = 3, /* a checksum is wrong, and the buffers hold no block; a kvs_get with KVS_VERIFY takes it out */
  KVS_LOAD_LOST = 4,    /* its writer ended, or the daemon asked it back */
  KVS_LOAD_REFUSED = 5  /* kvs_region_refusal says why; nothing was written */
} kvs_loaded;
/* The other way: copies the layers of what a kvs_get pinned, from layer_index on, out to their buffers, laid down as above, and
 * compares each with its checksum. results[0..kvs_blocks_count): a kvs_loaded each. Waits for no layer: of a followed block only
 * what is there. KVS_PINS_EXHAUSTED: nothing was written. Asks nobody. */
kvs_status kvs_region_load(kvs_region* region, const kvs_blocks* blocks, const kvs_buffer_shape* shape, const kvs_buffer* buffers,
                           uint32_t layer_index, uint8_t* results);
/* Why item i of this thread's last kvs_region_put, load, seal or seal_pieces was refused; "" if it was not, or that call was
 * about another region. Valid until this thread's next such call. Waits for nothing. */
const char* kvs_region_refusal(const kvs_region* region, size_t i);
/* Seals blocks where they lie: block i begins offsets[i] bytes into the region, a multiple of 4096, and has kvs_block_bytes()
 * there, its layers where kvs_block_layer() says. What stands between and behind the layers is written here. Nothing may write
 * to it until kvs_region_give_back answers KVS_TAKEN. results[0..count): KVS_SEALED, KVS_REGION_EXISTS, KVS_REGION_PENDING;
 * KVS_REFUSED: it cannot lie so, kvs_region_refusal says why; an item that is refused changes no other; KVS_REGION_NO_SPACE: a
 * part of it, or its key, is sealed here already and was not given back, or the daemon is another since: kvs_region_put can copy
 * it; or KVS_LOST: the daemon was asked and did not answer, the block may be sealed, and its memory is no part of the region any
 * more. Reads the layers, for their checksums. Asks the daemon. */
kvs_status kvs_region_seal(kvs_region* region, const kvs_key* keys, size_t count, uint32_t layout_id, const uint64_t* offsets,
                           const uint32_t* token_counts, uint32_t priority, uint32_t ttl_s, uint8_t* results);
/* The same of blocks whose buffers lie apart, laid down as for kvs_region_put: all layers of each, and buffers and layers whole
 * pages of 4096 bytes. Nothing is written here. KVS_REGION_NO_SPACE also from a daemon that is older. Reads the layers, for
 * their checksums. Asks the daemon. */
kvs_status kvs_region_seal_pieces(kvs_region* region, const kvs_key* keys, size_t count, uint32_t layout_id,
                                  const kvs_buffer_shape* shape, const kvs_buffer* buffers, const uint32_t* token_counts,
                                  uint32_t priority, uint32_t ttl_s, uint8_t* results);
typedef enum kvs_given_back {
  KVS_TAKEN = 0,      /* its memory is the caller's again */
  KVS_STILL_READ = 1, /* nobody finds it any more, but somebody reads it: to be asked again later */
  KVS_EVICTED = 2     /* not sealed in place here, or evicted: that memory is no part of the region any more */
} kvs_given_back;
/* Takes blocks that were sealed in place out of the store, one by one. results[0..count): a kvs_given_back each. Asks the
 * daemon. */
kvs_status kvs_region_give_back(kvs_region* region, const kvs_key* keys, size_t count, uint8_t* results);
/* What a block of so many tokens (0: as many as the layout has) takes in memory. Waits for nothing. */
kvs_status kvs_block_bytes(kvs_client* client, uint32_t layout_id, uint32_t tokens, uint64_t* bytes);
/* And where in it one layer lies. Waits for nothing. */
kvs_status kvs_block_layer(kvs_client* client, uint32_t layout_id, uint32_t tokens, uint32_t layer, kvs_buffer* place);
/* Gives up blocks whose layers are not all there. Asks the daemon. */
kvs_status kvs_region_forget(kvs_region* region, const kvs_key* keys, size_t count);

/* ---- the rest */

/* Takes blocks out of the store, whoever wrote them; who has them pinned keeps their bytes. deleted: how many were there, or
 * NULL. Asks the daemon. */
kvs_status kvs_delete(kvs_client* client, const kvs_key* keys, size_t count, size_t* deleted);
/* Counts as a use of the blocks, for eviction. there: how many there were, or NULL. Asks the daemon. */
kvs_status kvs_touch(kvs_client* client, const kvs_key* keys, size_t count, size_t* there);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* KVSTORED_KVSTORED_H */
