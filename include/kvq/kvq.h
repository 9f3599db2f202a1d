/* kvq.h: the C interface of libkvq, the library that model servers link.
 *
 * Invariant: handles are opaque, structs carry their size in their first member, numbers never change meaning; within one
 * KVQ_ABI_VERSION only additions happen. No C++ exception, no third-party type and no callback crosses this border.
 *
 * Conventions
 *   Errors    Every call that can fail returns kvq_status. kvq_last_error() has one line of text for this thread: what was wrong,
 *             with the value, and what to do. Nothing has happened when a call fails, unless its comment says otherwise.
 *   Ownership Handles belong to the caller and are given back with the named function, once. Arrays passed in are read (or filled)
 *             during the call only. Strings returned live as long as the handle they came from.
 *   Threads   Client and model handles may be used by any number of threads. A sequence handle is used by one thread at a time.
 *             Different sequences of one model may be used at once. Nothing here needs or keeps the Python GIL.
 *   Units     Tokens are counted in tokens, pages in pages (KVQ_PAGE_TOKENS tokens, all layers), deadlines in milliseconds from
 *             the call (0: only what is possible at once), strides in elements of the array they belong to.
 *   Restarts  When kvqd dies, the library connects to the next one by itself and takes up its sessions there; handles, pages and steps
 *             stay. Meanwhile steps, append, attend, lookup and everything that needs no answer go on (reserve within the credits at
 *             hand, commit, truncate, fork, park, drop_before, release, credits_return, get_pressure). Calls that need an answer
 *             (register_model, sequence_open with a cached prefix, credits that are not at hand, resume, lost_pages, commands for a
 *             full ring) wait for it until their deadline (those without one: 5000) and are made again; then they return
 *             DAEMON_GONE with a text that says that kvqd is restarting: call again later. When the next kvqd does not know the
 *             session, it is lost: each call on it but step_end, attend and append in open steps, lookup and what reads the
 *             handle returns DAEMON_GONE with a text that says that kvqd started anew: close the model and register again on the
 *             same client.
 *   Contexts  When a process's GPU context is lost, by a fault of any of its kernels, with another process under MPS, or by
 *             cudaDeviceReset, every call that needs the GPU returns CONTEXT_LOST from then on, and drivers of today give a
 *             process whose context has faulted no second one. Start the process anew and open its sequences again: their sealed
 *             pages are attached under their keys. Closing works all the same.
 *   Fork      A child process must not use its parent's handles: every call on them returns KVQ_ERR_FORKED. It may connect anew.
 *   Memory    One process has one mapping of a daemon's pages per tenant, however many clients and models it opens.
 */
#ifndef KVQ_H
#define KVQ_H

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#if defined(KVQ_BUILDING) && defined(__GNUC__)
#define KVQ_API __attribute__((visibility("default")))
#else
#define KVQ_API
#endif

#define KVQ_ABI_VERSION 1
#define KVQ_PAGE_TOKENS 64
#define KVQ_MAX_LAYERS 256
#define KVQ_NULL_PAGE 0      /* page id that reads as zeros and swallows writes */
#define KVQ_SKIP_SLOT (-1)   /* slot of a token that append must skip */

/* Outcomes. The numbers equal Errc in result.h. */
typedef enum kvq_status {
  KVQ_OK = 0,
  KVQ_ERR_INVALID_ARGUMENT = 1,  /* the call is wrong */
  KVQ_ERR_NO_DAEMON = 2,         /* nothing answers at the socket */
  KVQ_ERR_VERSION_MISMATCH = 3,  /* library and daemon speak different contract versions */
  KVQ_ERR_WRONG_LAYOUT = 4,      /* geometry, dtype or page size not supported, or not the registered one */
  KVQ_ERR_OVER_QUOTA = 5,        /* more than the tenant's quota can ever hold */
  KVQ_ERR_NO_MEMORY = 6,         /* no room before the deadline */
  KVQ_ERR_STALE_ID = 7,          /* names something that has ended */
  KVQ_ERR_LOST_PAGE = 8,         /* a page's content is gone: see kvq_lost_pages */
  KVQ_ERR_PERMISSION_DENIED = 9, /* the daemon does not allow this peer to do that */
  KVQ_ERR_LIMIT_REACHED = 10,    /* a bound: sequences, steps in flight, credits, sessions */
  KVQ_ERR_DAEMON_GONE = 11,      /* kvqd was not back before the deadline, or the session is lost: see Restarts */
  KVQ_ERR_FORKED = 12,           /* the handle belongs to the parent process */
  KVQ_ERR_SYSTEM = 13,           /* the operating system refused */
  KVQ_ERR_DRAINING = 14,         /* the daemon admits nothing new */
  KVQ_ERR_CONTEXT_LOST = 15      /* the GPU context is unusable, for good: see Contexts */
} kvq_status;

typedef enum kvq_dtype { KVQ_FP16 = 0, KVQ_BF16 = 1, KVQ_FP32 = 2 } kvq_dtype; /* fp32: queries and outputs only */

typedef enum kvq_format { /* numbers equal Format in types.h */
  KVQ_FORMAT_NONE = 0,
  KVQ_FORMAT_DENSE = 1,
  KVQ_FORMAT_INT4 = 2,
  KVQ_FORMAT_INT4_K4 = 3,
  KVQ_FORMAT_INT4_K8 = 4,
  KVQ_FORMAT_K8V4 = 5
} kvq_format;

typedef enum kvq_role { /* who uses the session */
  KVQ_ROLE_BOTH = 0,    /* one process schedules and computes */
  KVQ_ROLE_CONTROL = 1, /* schedules only: maps no pages, may not append, attend or step */
  KVQ_ROLE_DATA = 2     /* computes only: works on sequences imported from a control session */
} kvq_role;

typedef enum kvq_pressure_level { KVQ_CALM = 0, KVQ_QUANTIZE = 1, KVQ_EVICT = 2, KVQ_REFUSE = 3 } kvq_pressure_level;

typedef struct kvq_client kvq_client;     /* a connection to the daemon */
typedef struct kvq_model kvq_model;       /* a registered model: one session of the daemon */
typedef struct kvq_sequence kvq_sequence; /* one token stream being served */

/* --- library ------------------------------------------------------------------------------------------------------- */

KVQ_API uint32_t kvq_abi_version(void);
KVQ_API const char* kvq_version(void);                  /* "0.1.0" */
KVQ_API const char* kvq_status_name(kvq_status status); /* "no_memory"; never NULL */
KVQ_API const char* kvq_last_error(void);               /* of this thread's last failed call; never NULL */
KVQ_API const char* kvq_kernel_target(void);            /* instruction set in use on the host, e.g. "AVX3_DL" */

/* --- connect ------------------------------------------------------------------------------------------------------- */

typedef struct kvq_connect_options {
  size_t size;             /* sizeof(kvq_connect_options) */
  const char* socket_path; /* NULL: environment KVQ_SOCKET, else /run/kvq/kvqd.sock */
  const char* label;       /* shown by kvqctl; NULL: the process's name */
  uint32_t deadline_ms;    /* for connecting; 0: 5000 */
} kvq_connect_options;

/* Connects to kvqd and starts the one thread that talks to it, and that connects again whenever kvqd was restarted, for as long as
 * the client lives. options may be NULL.
 * Errors: NO_DAEMON, VERSION_MISMATCH, PERMISSION_DENIED, SYSTEM. */
KVQ_API kvq_status kvq_connect(const kvq_connect_options* options, kvq_client** client);

/* Ends the connection; waits for no daemon. Its models must be closed first (INVALID_ARGUMENT otherwise). NULL is ignored. */
KVQ_API kvq_status kvq_disconnect(kvq_client* client);

/* --- model --------------------------------------------------------------------------------------------------------- */

typedef struct kvq_layer {
  uint16_t kv_heads;   /* of this rank */
  uint16_t head_dim;   /* 64, 80, 96, 128, 192 or 256; K and V alike */
  uint8_t dtype;       /* kvq_dtype of the stored K and V: fp16 or bf16 */
  uint8_t keep_dense;  /* 1: this layer is never quantized */
  uint16_t query_heads;/* of this rank; a multiple of kv_heads, at most 16 times as many */
} kvq_layer;

typedef struct kvq_model_desc {
  size_t size;                /* sizeof(kvq_model_desc) */
  const kvq_layer* layers;    /* layer table of this rank */
  uint32_t layer_count;       /* 1 .. KVQ_MAX_LAYERS */
  uint32_t page_tokens;       /* KVQ_PAGE_TOKENS */
  uint8_t fingerprint[32];    /* digest over everything that changes K and V: weights, RoPE parameters, adapters merged in */
  kvq_role role;
  uint8_t format_floor_dense; /* 1: no page of this session is ever quantized while the session holds it */
  uint32_t credits;           /* pages to keep ready for kvq_reserve, at most 4096; 0: 8 */
  uint32_t deadline_ms;       /* 0: 5000 */
  const char* device;         /* where this process's kernels run: UUID of a GPU ("GPU-..."), "host", or NULL: where
                                 kvqd has its pages; of several GPUs the calling thread's current one, else the first visible one */
} kvq_model_desc;

/* Opens a session for one model. A process with two models registers both (each has its own credits and steps).
 * When kvqd keeps its pages on a GPU, that GPU (known by its UUID) must be among those that the process sees; the process gets its
 * primary context, the one that the CUDA runtime uses, too. A control session needs no GPU; when kvqd serves several, it names one.
 * Errors: WRONG_LAYOUT, VERSION_MISMATCH, LIMIT_REACHED, DRAINING, OVER_QUOTA, DAEMON_GONE; INVALID_ARGUMENT (kvqd does not serve
 * `device`, or the GPU is hidden), SYSTEM (no driver, or too old a one, or a libkvq built without CUDA). */
KVQ_API kvq_status kvq_register_model(kvq_client* client, const kvq_model_desc* desc, kvq_model** model);

/* Ends the session; waits for no daemon. Calls of other threads that wait on its sequences return STALE_ID. Sequences that are still
 * open are released; using their handles afterwards returns STALE_ID until they are freed with kvq_sequence_release. Steps must
 * have ended (INVALID_ARGUMENT otherwise), on a GPU too: synchronize their streams first. NULL is ignored. */
KVQ_API kvq_status kvq_model_close(kvq_model* model);

typedef struct kvq_model_info {
  size_t size;                 /* set by the caller */
  uint32_t session;            /* daemon's number for it */
  uint32_t tenant;
  const char* tenant_name;
  uint64_t arena_bytes;        /* addresses reserved for it: the most that kvqd may make it, not what it is */
  uint64_t slab_bytes;
  uint64_t dense_page_bytes;   /* one page of this model, dense */
  uint64_t cold_page_bytes;    /* the same in the daemon's cold format */
  kvq_format cold_format;
  const char* device;          /* "host" or "cuda" */
  const char* device_uuid;     /* of the GPU that holds the pages; "" on the host */
} kvq_model_info;
KVQ_API kvq_status kvq_model_get_info(kvq_model* model, kvq_model_info* info);

/* --- what is cached ------------------------------------------------------------------------------------------------ */

/* What else takes part in a page's identity. Engines put adapter names, image digests or a request's salt here. */
typedef struct kvq_extra_key {
  uint64_t first_token; /* applies to pages that overlap [first_token, first_token + tokens) */
  uint64_t tokens;
  const void* data;
  size_t data_bytes;
} kvq_extra_key;

typedef struct kvq_lookup_result {
  size_t size;             /* set by the caller */
  uint64_t cached_tokens;  /* longest cached prefix, a multiple of KVQ_PAGE_TOKENS */
  uint64_t dense_tokens;   /* of these, by tier and format ... */
  uint64_t quantized_tokens;
  uint64_t host_tokens;    /* in host memory: opening must restore them first */
  uint8_t pending;         /* 1: another session is writing the next page; asking again later may find more */
} kvq_lookup_result;

/* Longest cached prefix of `tokens`, from shared memory: no RPC, no side effects, any thread. */
KVQ_API kvq_status kvq_lookup(kvq_model* model, const uint32_t* tokens, uint64_t token_count, const kvq_extra_key* extra_keys,
                              size_t extra_key_count, kvq_lookup_result* result);

/* --- sequences ----------------------------------------------------------------------------------------------------- */

typedef struct kvq_open_options {
  size_t size;                 /* sizeof(kvq_open_options) */
  const kvq_extra_key* extra_keys;
  size_t extra_key_count;
  uint8_t private_pages;       /* 1: attach nothing and let nobody attach: no prefix keys */
  uint8_t format_floor_dense;  /* 1: attach dense pages only, and quantize none of this sequence's while it runs */
} kvq_open_options;

/* Opens a running sequence whose first tokens are the longest cached prefix of `tokens` (possibly none); their K and V are
 * attached, not copied. *cached_tokens says how many (NULL: not wanted). options may be NULL.
 * Errors: STALE_ID never (a prefix that vanishes meanwhile is simply shorter), LIMIT_REACHED, DRAINING, DAEMON_GONE. */
KVQ_API kvq_status kvq_sequence_open(kvq_model* model, const uint32_t* tokens, uint64_t token_count,
                                     const kvq_open_options* options, uint64_t* cached_tokens, kvq_sequence** sequence);

/* Makes room for `tokens` tokens past the committed ones, from credits; when those are used up, asks the daemon and waits at most
 * deadline_ms. All or nothing. Errors: NO_MEMORY, OVER_QUOTA, LIMIT_REACHED (more than 4096 pages in one call), DRAINING,
 * DAEMON_GONE. */
KVQ_API kvq_status kvq_reserve(kvq_sequence* sequence, uint64_t tokens, uint32_t deadline_ms);
/* The same for several sequences of one model; all or nothing. */
KVQ_API kvq_status kvq_reserve_batch(kvq_sequence* const* sequences, const uint64_t* tokens, size_t count, uint32_t deadline_ms);

/* Declares the next `token_count` tokens final. Their K and V were appended before, in step `step` (0: in steps that have ended).
 * Pages that become full are sealed once that step has ended; from then on they are immutable, shareable and may be quantized.
 * step_session: the session that ran the step, 0 for this one (a control session names its data session). */
KVQ_API kvq_status kvq_commit(kvq_sequence* sequence, const uint32_t* tokens, uint64_t token_count, uint64_t step,
                              uint32_t step_session);

/* Keeps the first `tokens` committed tokens. Rejected drafts need no call (uncommitted tokens are simply overwritten). A cut inside
 * a sealed page copies the kept part to a fresh page (one credit; waits at most deadline_ms), which a control session cannot. */
KVQ_API kvq_status kvq_truncate(kvq_sequence* sequence, uint64_t tokens, uint32_t deadline_ms);

/* Gives up pages wholly before `position` (sliding windows). Attention must not need them again: they become null pages. */
KVQ_API kvq_status kvq_drop_before(kvq_sequence* sequence, uint64_t position);

/* A new running sequence with the same committed tokens. Full pages are shared, also while their step still runs; an unfinished last
 * page is copied (one credit), which a control session cannot. */
KVQ_API kvq_status kvq_fork(kvq_sequence* sequence, uint32_t deadline_ms, kvq_sequence** child);

/* Parked: must not be appended to or attended; its pages may be evicted. resume waits for room. */
KVQ_API kvq_status kvq_park(kvq_sequence* sequence);
KVQ_API kvq_status kvq_resume(kvq_sequence* sequence, uint32_t deadline_ms);

/* Ends the sequence and frees the handle, whether kvqd is there or not. Steps in flight may still read its pages; they stay intact
 * until those end. NULL is ignored. Sealed pages stay cached for others to attach. */
KVQ_API kvq_status kvq_sequence_release(kvq_sequence* sequence);

typedef struct kvq_sequence_info {
  size_t size;               /* set by the caller */
  uint32_t id;               /* unique in the session */
  uint64_t committed_tokens;
  uint64_t reserved_tokens;  /* room, committed ones included: a multiple of KVQ_PAGE_TOKENS */
  uint64_t pages;
  uint64_t dense_pages;      /* by format now */
  uint64_t quantized_pages;
  uint64_t lost_pages;
  uint8_t parked;
} kvq_sequence_info;
KVQ_API kvq_status kvq_sequence_get_info(kvq_sequence* sequence, kvq_sequence_info* info);

/* Writes the sequence's page ids (kvq_sequence_info.pages of them) to out[0 .. capacity); *count gets how many there are.
 * INVALID_ARGUMENT if capacity is too small (then *count is still set). */
KVQ_API kvq_status kvq_block_table(kvq_sequence* sequence, int32_t* out, size_t capacity, size_t* count);

/* Writes the slots (page id * KVQ_PAGE_TOKENS + place in page) of tokens [first, first + count) of the sequence to out. */
KVQ_API kvq_status kvq_slot_mapping(kvq_sequence* sequence, uint64_t first, uint64_t count, int64_t* out);

/* The sequence as flat bytes without pointers, for another process's data session (kvq_sequence_import). With out NULL only
 * *bytes is set. */
KVQ_API kvq_status kvq_sequence_export(kvq_sequence* sequence, void* out, size_t capacity, size_t* bytes);
/* A view of another session's sequence of the same tenant and model: may append and attend; may not commit, reserve, fork or
 * truncate; releasing it ends only the view. Errors: STALE_ID, WRONG_LAYOUT, INVALID_ARGUMENT. */
KVQ_API kvq_status kvq_sequence_import(kvq_model* model, const void* data, size_t bytes, kvq_sequence** sequence);

/* --- credits and pressure ------------------------------------------------------------------------------------------ */

/* Credits are pages granted in advance: reserving a granted page cannot fail. Waits until `pages` are there, at most deadline_ms. */
KVQ_API kvq_status kvq_credits_request(kvq_model* model, uint32_t pages, uint32_t deadline_ms);
KVQ_API kvq_status kvq_credits_return(kvq_model* model, uint32_t pages); /* gives back up to `pages` unused ones */

typedef struct kvq_pressure {
  size_t size;                   /* set by the caller */
  kvq_pressure_level level;
  uint32_t credits;              /* unused pages at hand */
  uint32_t credits_wanted_back;  /* pages the daemon asks for: return credits, or park or release sequences */
  uint64_t lost_pages;           /* of this session so far: see kvq_lost_pages */
  uint8_t draining;
  uint8_t reconnecting;          /* 1: kvqd is away; the session waits to be resumed */
  uint32_t reconnects;           /* times this session was resumed by a kvqd that came back */
} kvq_pressure;
/* Reads shared memory; no RPC. While kvqd is away the words are as it left them. Errors: DAEMON_GONE once the session is lost. */
KVQ_API kvq_status kvq_get_pressure(kvq_model* model, kvq_pressure* pressure);

/* An eventfd that becomes readable when kvq_get_pressure may say something new; also when kvqd goes away, when it is back, and
 * when the session is lost. Owned by the model; poll it, read 8 bytes to clear. */
KVQ_API kvq_status kvq_notice_fd(kvq_model* model, int* fd);

/* Pages of this session whose content was lost after the count `since` (0 at first), and the sequences that hold them: up to
 * `capacity` pairs; *count gets how many there are, *now the count to pass next time. */
KVQ_API kvq_status kvq_lost_pages(kvq_model* model, uint64_t since, int32_t* pages, uint32_t* sequences, size_t capacity,
                                  size_t* count, uint64_t* now);

/* --- steps --------------------------------------------------------------------------------------------------------- */

/* One forward pass. Between begin and end nothing that append and attend may touch is reused, moved pages included. At least 4 and
 * at most 64 steps of a session may be in flight. Errors: LIMIT_REACHED; DAEMON_GONE when the session is lost, or kvqd lives but let
 * it go (its connection broke): steps already open may end. While kvqd itself is away, steps go on. CONTEXT_LOST: see Contexts. */
KVQ_API kvq_status kvq_step_begin(kvq_model* model, uint64_t* step);
/* stream: NULL on the host device. On a GPU the step ends when all that was launched on `stream` (a cudaStream_t; NULL: the legacy
 * default stream) before this call is over; the call waits for nothing, and the next step may begin at once. Not for a stream that is
 * being captured: begin and end steps around a graph's launch. CONTEXT_LOST: the step has ended all the same, but what it was to
 * write may be missing: do not commit its tokens. */
KVQ_API kvq_status kvq_step_end(kvq_model* model, uint64_t step, void* stream);

/* On a GPU append and attend launch on `stream` and return: they neither wait nor allocate (but for the model's workspace, at its first
 * use), and may be captured into a graph that is launched again with other slots, lengths and tables in the same arrays. All arrays are
 * in the GPU's memory, slots, tables and lengths included. What only the GPU can see (a page that is not there) is said by
 * kvq_get_fault. After CONTEXT_LOST nothing runs any more: see Contexts. */

/* Writes K and V of `tokens` tokens of one layer. Data pointers are in the device's memory. Needs an open step, as kvq_attend does. */
typedef struct kvq_append_args {
  size_t size;                  /* sizeof(kvq_append_args) */
  uint32_t layer;
  uint32_t tokens;
  const void* k;                /* [tokens][kv_heads][head_dim] in the layer's dtype; NULL: V only */
  const void* v;                /* likewise; NULL: K only */
  int64_t k_token_stride, k_head_stride; /* elements; the channel stride is 1 */
  int64_t v_token_stride, v_head_stride;
  const int64_t* slots;         /* [tokens] page * 64 + place; KVQ_SKIP_SLOT and null-page slots are skipped; slots of sealed
                                   pages are ignored (their content is already there) */
  uint8_t slots_are_aliases;    /* 1: the page part of a slot is an alias (kvq_set_aliases) */
  void* stream;
} kvq_append_args;
KVQ_API kvq_status kvq_append(kvq_model* model, const kvq_append_args* args);

/* Attention of a batch of sequences over their pages, whatever mix of formats these have now. */
typedef struct kvq_attend_args {
  size_t size;                  /* sizeof(kvq_attend_args) */
  uint32_t layer;
  uint32_t batch;               /* sequences */
  const void* q;                /* [query tokens][query_heads][head_dim] */
  int64_t q_token_stride, q_head_stride;
  void* out;                    /* [query tokens][query_heads][head_dim] */
  int64_t out_token_stride, out_head_stride;
  uint8_t q_dtype, out_dtype;   /* kvq_dtype: fp16, bf16 or fp32 */
  const int32_t* query_starts;  /* [batch + 1] first query token of each sequence; the last is the total */
  const int32_t* seq_lengths;   /* [batch] K/V tokens of each sequence, this step's included; queries are its last tokens */
  const int32_t* block_table;   /* [batch][block_table_stride] page ids */
  int64_t block_table_stride;
  uint8_t table_has_aliases;    /* 1: entries are aliases */
  uint32_t query_heads;
  float scale;                  /* 0: 1 / sqrt(head_dim) */
  float soft_cap;               /* 0: none; else score = cap * tanh(score / cap) */
  int32_t window;               /* tokens a query sees, itself included; -1: all */
  uint8_t non_causal;           /* must be 0: other masks are refused */
  const float* alibi_slopes;    /* [query_heads] or NULL */
  const float* sinks;           /* [query_heads] learned sink logits that join the denominator, or NULL */
  float* lse;                   /* [query tokens][query_heads] natural log-sum-exp of the scaled scores, sinks included; or NULL.
                                   -inf (and zeros in out) where a query sees nothing */
  uint32_t threads;             /* host device: at most this many; 0: all of the process's CPUs */
  void* workspace;              /* NULL on the host device. On a GPU: kvq_attend_workspace_bytes of device memory, aligned to 256 bytes,
                                   that one call at a time uses; NULL: the model's own, for calls on one stream at a time */
  size_t workspace_bytes;
  void* stream;
  uint32_t max_query_tokens;    /* most query tokens of one sequence, a hint for speed on a GPU, never for correctness; 0: unknown */
} kvq_attend_args;
/* Errors: INVALID_ARGUMENT, WRONG_LAYOUT, STALE_ID, LOST_PAGE. */
KVQ_API kvq_status kvq_attend(kvq_model* model, const kvq_attend_args* args);

/* Merges two partial results over disjoint keys (a: in and out), fp32: out [rows][head_dim], lse [rows]. */
KVQ_API kvq_status kvq_merge_states(float* out_a, float* lse_a, const float* out_b, const float* lse_b, uint64_t rows,
                                    uint32_t head_dim);

/* The same on the model's device, in the order of `stream` on a GPU (arrays in its memory). */
KVQ_API kvq_status kvq_merge_states_on(kvq_model* model, float* out_a, float* lse_a, const float* out_b, const float* lse_b,
                                       uint64_t rows, uint32_t head_dim, void* stream);

/* Device memory that kvq_attend needs for any call of this model: *bytes is 0 on the host device. */
KVQ_API kvq_status kvq_attend_workspace_bytes(kvq_model* model, size_t* bytes);

/* What a kernel could not do; the rows that needed the page are NaN, the token was left out. */
typedef struct kvq_fault {
  size_t size;       /* set by the caller */
  kvq_status status; /* KVQ_OK: nothing since the last question */
  uint32_t layer;
  uint32_t index;    /* of the sequence in the batch (attend) or of the token (append), its low 16 bits */
  int32_t page;
} kvq_fault;
/* The first fault of the model's kernels since the last call; reading clears it. No call into the GPU: what has not run yet is not
 * seen. Always KVQ_OK inside on the host device, where append and attend themselves say it. */
KVQ_API kvq_status kvq_get_fault(kvq_model* model, kvq_fault* fault);

/* Aliases: an engine's own block numbers for kvq pages. Set between steps. page KVQ_NULL_PAGE clears one. alias < 2^24. On a GPU the
 * table takes 64 MiB of its memory, and a set waits for the model's steps that still run there; kvq_set_aliases_on does not: it takes
 * effect in the order of `stream`. */
typedef struct kvq_alias {
  int32_t alias;
  int32_t page;
} kvq_alias;
KVQ_API kvq_status kvq_set_aliases(kvq_model* model, const kvq_alias* aliases, size_t count);
KVQ_API kvq_status kvq_set_aliases_on(kvq_model* model, const kvq_alias* aliases, size_t count, void* stream);

#if defined(__cplusplus)
}
#endif
#endif
