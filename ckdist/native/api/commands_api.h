#ifndef CKDIST_API_COMMANDS_H
#define CKDIST_API_COMMANDS_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* The commands of rank 0 to every rank, itself included. Ranks execute them in their order (native/runtime/worker.h).
   A message is int32 numbers: a struct ckdist_command, then the data of its kind. */
enum ckdist_command_kind {
  ckdist_command_stop = 0,        /* ckdist_worker_work returns */
  ckdist_command_report = 1,      /* the rank sends the statistics of a model to rank 0 */
  ckdist_command_run = 2,         /* struct ckdist_run and its arrays: a step of a model */
  ckdist_command_copy_blocks = 3, /* struct ckdist_copy_blocks and its pairs: blocks of a model's cache */
  /* The loop of the rank returns these to its caller, which then calls ckdist_worker_work again. */
  ckdist_command_load = 4, /* the rank begins to load a model, while steps of other models run */
  ckdist_command_add = 5,  /* every rank has loaded the model: ckdist_worker_add, after which it may run */
  /* The model has run for the last time, or a rank could not load it. The worker no longer knows it; the caller frees
     its memory. */
  ckdist_command_unload = 6,
  ckdist_command_kinds = 7
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
};
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

/* Copies blocks of all layers between the cache of each rank and its block store, while steps run. No step may write
   such a block, or read one that is copied into the cache, before a command has waited for the copy. */
struct ckdist_copy_blocks {
  struct ckdist_command command;
  int32_t into_cache; /* 0: from the cache to the store; 1: from the store to the cache */
  int32_t pairs;
};
enum { ckdist_copy_pairs = 128 }; /* maximum of a command */
struct ckdist_block_pair {
  int32_t block, stored; /* block of the cache, block of the store */
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
/* Records copies of blocks in a lane of their own. Before the first copy. The trace must outlive the worker. */
CKDIST_EXPORT int ckdist_worker_trace(struct ckdist_worker* worker, struct ckdist_trace* trace);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
