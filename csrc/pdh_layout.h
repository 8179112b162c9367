/* The C interface of pdhandoff's kernels: rows of paged caches are copied, converted, hashed and zeroed.
 *
 * libpdh_cpu and libpdh_cuda implement all of it. Addresses are absolute; strides, offsets and sizes are in bytes. A row is
 * one token of one head in one layer; element e of it lies at
 *
 *     bases[region][layer] + page * page_stride + offset + slot * token_stride + head * head_stride + e * element_stride
 *
 * Functions return PDH_OK or a negative pdh_status, and leave a sentence for pdh_last_error. They may be called from any thread.
 * The caller has checked that pages, heads and tokens are within bounds; what the arrays point to is read during the call only.
 *
 * What stands between "cdef begin" and "cdef end" is also read by cffi, so it holds no preprocessor lines.
 */
#ifndef PDH_LAYOUT_H
#define PDH_LAYOUT_H

#include <stdint.h>

#define PDH_ABI_VERSION 1u

#if defined(__GNUC__)
#define PDH_EXPORT __attribute__((visibility("default")))
#else
#define PDH_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* cdef begin */

enum pdh_status {
  PDH_OK = 0,
  PDH_ARGUMENT = -1,    /* a description that makes no sense: a null base, a negative size */
  PDH_UNSUPPORTED = -2, /* rows that this library cannot handle, and another may */
  PDH_MEMORY = -3,      /* out of memory, on the host or on the device */
  PDH_DEVICE = -4       /* the CUDA driver or the device reports an error, or there is none */
};

enum pdh_element { PDH_BF16 = 0, PDH_F16 = 1, PDH_F32 = 2, PDH_E4M3 = 3, PDH_UE8M0 = 4, PDH_UE8M0X4 = 5 };

enum pdh_kind {
  PDH_COPY = 0,   /* source to destination, bit by bit: same element and number of elements */
  PDH_SCALES = 1, /* block scales to another type of scale */
  PDH_CONVERT = 2 /* decode, apply the steps, encode */
};

enum pdh_step_kind { PDH_HADAMARD128 = 0, PDH_INTERLEAVED = 1, PDH_HALF_SPLIT = 2 };

/* One plane of a component, on one side. */
typedef struct {
  int64_t offset;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t element_stride;
  int32_t elements;
  int32_t element;    /* enum pdh_element */
  int32_t region;     /* row of pdh_side.bases */
  int32_t row_offset; /* of its bytes in a row as it is hashed; source side only */
} pdh_plane;

typedef struct {
  int32_t kind; /* enum pdh_step_kind: what the elements become */
  int32_t rope; /* rotary elements, at the front of the row */
} pdh_step;

/* What happens to one part of a row. Groups are elements that share one scale; 0: no scales. */
typedef struct {
  pdh_plane source;
  pdh_plane source_scale;
  pdh_plane destination;
  pdh_plane destination_scale;
  int32_t kind; /* enum pdh_kind */
  int32_t source_group;
  int32_t destination_group;
  int32_t steps;
  pdh_step step[4];
} pdh_part;

/* Where rows lie: bases and page table of one side. */
typedef struct {
  const uint64_t *bases; /* [region][layer] */
  const int64_t *pages;  /* page ids in token order */
  int64_t page_count;
  int64_t null_page; /* id of a missing page, or INT64_MIN: its tokens are skipped */
  int64_t first_token;
  int64_t page_tokens;
  int32_t regions;
  int32_t head_start; /* the first head of the job, as this side counts them */
} pdh_side;

/* Rows [token_start, token_stop) of one component: converted and hashed; then [token_stop, zero_stop) zeroed. */
typedef struct {
  pdh_side source;
  pdh_side destination;
  const pdh_part *parts;
  const pdh_plane *row;      /* the source planes of a whole row in hashing order */
  const pdh_plane *zero;     /* destination planes to zero */
  const uint64_t *head_keys; /* [layer][head]; null: no digest */
  int64_t token_start;
  int64_t token_stop;
  int64_t zero_stop;
  int32_t part_count;
  int32_t row_count;
  int32_t zero_count;
  int32_t layers;
  int32_t heads;
  int32_t reserved;
} pdh_job;

/* Work that was submitted. */
typedef struct {
  uint64_t digest; /* sum over all jobs; valid when done */
  int64_t handle;  /* 0: nothing is held */
  int32_t done;
  int32_t reserved;
} pdh_ticket;

/* Copy i of layer l moves length[i] bytes, count times, each time one step further on both sides. */
typedef struct {
  const int64_t *source_bases;
  const int64_t *destination_bases;
  const int64_t *source;
  const int64_t *destination;
  const int64_t *length;
  int64_t layers;
  int64_t copies;
  int64_t count;
  int64_t source_step;
  int64_t destination_step;
} pdh_copy_block;

PDH_EXPORT uint32_t pdh_abi_version(void);

/* sizeof pdh_job, pdh_part, pdh_plane, pdh_copy_block as 16 bits each: both sides of the interface must agree. */
PDH_EXPORT uint64_t pdh_abi_sizes(void);

/* The last error of this thread; an empty string where there was none. */
PDH_EXPORT const char *pdh_last_error(void);

/* Devices that it can run on: 1 for the CPU; PDH_DEVICE where there is no driver or no device. */
PDH_EXPORT int32_t pdh_devices(void);

/* Start all jobs in one launch. own_stream != 0: on a stream of the library's own, `stream` is not looked at.
 * On the CPU the work is done on return. The ticket must go to pdh_poll until it is done, or to pdh_release. */
PDH_EXPORT int32_t pdh_submit(const pdh_job *jobs, int32_t count, uint64_t stream, int32_t own_stream, pdh_ticket *ticket);

/* Set ticket.done and, when it is, ticket.digest. Never blocks. A device error is returned once, and ends the ticket. */
PDH_EXPORT int32_t pdh_poll(pdh_ticket *ticket);

/* pdh_poll, again and again, until it is done or `timeout_ns` have passed: then ticket.done is 0. */
PDH_EXPORT int32_t pdh_wait(pdh_ticket *ticket, int64_t timeout_ns);

/* Give up interest: the work goes on, its result is dropped. */
PDH_EXPORT void pdh_release(pdh_ticket *ticket);

/* Plain copies. Done on return. */
PDH_EXPORT int32_t pdh_copy(const pdh_copy_block *blocks, int32_t count);

/* cdef end */

#ifdef __cplusplus
}
#endif

#endif
