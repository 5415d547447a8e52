#pragma once
#include "api/export.h"

/* The commands of rank 0 to every rank, itself included. Ranks execute them in their order (native/runtime/worker.h).
   A message is int32 numbers: a struct ckdist_command, then the data of its kind. */
enum ckdist_command_kind {
  ckdist_command_stop = 0,        /* ckdist_worker_work returns */
  ckdist_command_report = 1,      /* the rank sends the statistics of a model to rank 0 */
  ckdist_command_run = 2,         /* struct ckdist_run and its arrays: a step of a model */
  ckdist_command_copy_blocks = 3, /* struct ckdist_copy_blocks and its copies: blocks of a model's cache */
  /* The loop of the rank returns these to its caller, which then calls ckdist_worker_work again. */
  ckdist_command_load = 4, /* the rank begins to load a model, while steps of other models run */
  ckdist_command_add = 5,  /* every rank has loaded the model: ckdist_worker_add, after which it may run */
  /* The model has run for the last time, or a rank could not load it. The worker no longer knows it; the caller frees
     its memory. */
  ckdist_command_unload = 6,
  ckdist_command_copy_results = 7, /* the rank sends the results of its copies to rank 0, without waiting for any */
  /* The loop of the rank returns this, too. The rank begins to load an adapter into a slot that no step uses. */
  ckdist_command_adapt = 8,
  ckdist_command_kinds = 9
};
struct ckdist_command {
  int32_t kind, model;
  int32_t copies; /* the number of copy_blocks commands so far whose copies must end before this command runs */
};

struct ckdist_run {
  struct ckdist_command command;
  /* Lengths of the arrays that follow. blocks: of all sequences together. states, firsts: the number of sequences,
     or 0. */
  int32_t tokens, sequences, blocks, selected, states, firsts;
  int32_t threads;     /* threads to use, at most those of the pool */
  int32_t plan, steps; /* plan to run, number of its steps; 0: all */
  int32_t embeddings;  /* rows of embeddings after the other arrays */
  int32_t positions;   /* the number of tokens, or 0: positions of three axes before the embeddings */
  /* A multiple of the number of sequences: for each sequence an adapter, or -1, and its scale, 8 bytes of a double.
     Then a second adapter for each, and so on, before the positions. */
  int32_t adapters;
};
enum { ckdist_most_adapters = 8 }; /* adapters of a sequence */
/* Consecutive tokens of one sequence. */
struct ckdist_sequence_chunk {
  int32_t tokens, first_position, blocks;
};
/* Slots of the states of a sequence's chunk. A slot that one sequence of a batch writes is used by no other. */
struct ckdist_state_slots {
  int32_t in;            /* state of the tokens before the chunk; -1: there are none */
  int32_t out;           /* state after all tokens of the chunk */
  int32_t save;          /* state of the tokens before `save_position`; -1: none */
  int32_t save_position; /* greater than the first position, at most the end */
};
enum { ckdist_block_tokens = 16 }; /* positions of one block of the cache */

/* A slab is a pair of files of a rank, with slots of equal size: the blocks of all layers' caches, or the states of a
   sequence after a block. */
enum ckdist_slab_kind { ckdist_slab_blocks = 0, ckdist_slab_states = 1, ckdist_slab_kinds = 2 };
/* The identity of a stored block. It is stored with the block and compared at a load, so a load never returns other
   data. */
struct ckdist_slab_entry {
  int32_t name[8], parent[8]; /* hashes of 32 bytes; the parent of a first block is its tenant's root */
  int32_t tokens[ckdist_block_tokens];
  int32_t depth;         /* blocks before it in its sequence */
  int32_t kind;          /* of enum ckdist_slab_kind */
  int32_t generation[2]; /* order of the stores, the lower half first */
};
/* The file of headers has one of these per slot. The other file has the data, at multiples of the stride. */
struct ckdist_slab_header {
  char magic[8];
  struct ckdist_slab_entry entry;
  uint64_t checksum; /* of magic, entry and data */
  uint8_t reserved[96];
};
/* Bytes between the data of two slots. */
CKDIST_EXPORT int64_t ckdist_slab_stride(int64_t bytes);
/* 1 if a header and `bytes` of data belong together and are undamaged, else 0. */
CKDIST_EXPORT int ckdist_slab_check(const struct ckdist_slab_header* header, const void* data, int64_t bytes);

/* Gives the space of a range of a file back to the file system, and reads as zeros then. Returns 0 or an errno. */
CKDIST_EXPORT int ckdist_slab_punch(int32_t file, int64_t at, int64_t bytes);

/* Copies blocks of all layers, or states, between the cache of each rank and its slab, while steps run. No step may
   write such a block, or read one that is copied into the cache, before a command has waited for the copy. A copy that
   fails on a rank ends there; ckdist_command_copy_results returns how much of it succeeded. */
struct ckdist_copy_blocks {
  struct ckdist_command command;
  int32_t into_cache; /* 0: from the cache to the slab; 1: from the slab to the cache */
  int32_t count;
};
struct ckdist_block_copy {
  int32_t place; /* block of the cache, or slot of states */
  int32_t slot;  /* of the slab */
  struct ckdist_slab_entry entry;
};
enum { ckdist_copies_most = 64 }; /* maximum of a command */

/* The results of a rank's last commands of copies. The one with number n is results[n % ckdist_results_kept]. */
enum { ckdist_results_kept = 32 };
struct ckdist_copy_result {
  int32_t good;  /* leading copies that succeeded */
  int32_t error; /* errno of the first that failed; 0: none */
  int64_t nanoseconds;
};
struct ckdist_copy_results {
  int64_t ended; /* commands of copies that have ended */
  struct ckdist_copy_result results[ckdist_results_kept];
};

/* A rank's loop of commands, with the job's channel of commands and a table of models. */
struct ckdist_worker;
struct ckdist_communicator;
struct ckdist_executable;
struct ckdist_step_stats;
struct ckdist_trace;

/* `job`: all ranks; it must outlive the worker. */
CKDIST_EXPORT int ckdist_worker_new(struct ckdist_communicator* job, struct ckdist_worker** out);
CKDIST_EXPORT void ckdist_worker_free(struct ckdist_worker* worker);
/* Adds a model, which must outlive the worker or be unloaded before. A collective call while no step is in flight. */
CKDIST_EXPORT int ckdist_worker_add(struct ckdist_worker* worker, int32_t model, struct ckdist_executable* executable);
/* Rank 0: publishes a command to all ranks. The message of a step must not change until the step has run. */
CKDIST_EXPORT int ckdist_worker_publish(struct ckdist_worker* worker, const int32_t* message, int64_t ints);
/* Rank 0: runs its own part of the oldest published step that has not run. */
CKDIST_EXPORT int ckdist_worker_run(struct ckdist_worker* worker);
/* Other ranks: executes commands until one that the caller has to execute, or the stop. */
CKDIST_EXPORT int ckdist_worker_work(struct ckdist_worker* worker, struct ckdist_command* out);
/* Rank 0, while no step is in flight: the statistics of a model on every rank, (ranks,). */
CKDIST_EXPORT int ckdist_worker_report(struct ckdist_worker* worker, int32_t model, struct ckdist_step_stats* out);
/* Rank 0, while no step is in flight: the results of the copies on every rank, (ranks,). */
CKDIST_EXPORT int ckdist_worker_copy_results(struct ckdist_worker* worker, struct ckdist_copy_results* out);
/* Records copies of blocks in a lane of their own. Before the first copy. The trace must outlive the worker. */
CKDIST_EXPORT int ckdist_worker_trace(struct ckdist_worker* worker, struct ckdist_trace* trace);
