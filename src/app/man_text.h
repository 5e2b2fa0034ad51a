#pragma once

namespace distrain::app {

// The common parts of all man pages, in man.cpp's form. PROGRAM stands for the program's name.

/// The end of each DESCRIPTION: of the program's page, of a job's.
inline constexpr const char* kProgramDescription = R"(
A command starts every rank of its job on this machine and supervises them. With --rank, or where
torchrun, mpirun or srun named a rank in the environment, the process is that one rank and joins the
others.
)";

inline constexpr const char* kJobDescription = R"(
By itself the command starts every rank here. With --rank it is one rank, and nothing else has to be
given on one machine: the options of rank 0 hold for the job, and the others inherit them. An option
given to another rank has to say the same.

Options may be written `--option=value` or `--option value`, and with `_` for `-` inside their names.
The last one holds.
)";

/// The beginning of the program's OUTPUT, and what follows its events.
inline constexpr const char* kOutput = R"(
Standard output is JSON lines and nothing else, one object a line, from all ranks:

    {"v":1,"ts":1795239262.9,"run":"5d0f3a1c9be27e44","event":"step","cmd":"train",
     "rank":0,"role":"trainer0","epoch":1,"step":20,...}

Numbers are finite or null. Each line has `v`, the version of the format; `ts`, when it was written,
in seconds since 1970; `run`, which all ranks of a job have in common (null before they have met);
`event`; `cmd`, the subcommand; `rank` and `role`, whose line it is (null and launcher: the process
that started the ranks; both null: rank 0 has yet to say which rank it is). `PROGRAM schema` prints the JSON Schema of all lines.
Any job has these events; the page of a job has its own.
)";

inline constexpr const char* kOutputEnd = R"(
Standard error has the progress, when it is a terminal and standard output is a file or /dev/null,
and one line when a job fails.
)";

/// Of the program's page, after OUTPUT.
inline constexpr struct {
  const char* title;
  const char* text;
} kSections[] = {
    {"DEVICES", R"(
--device puts what a job computes on GPUs (CUDA: compiled, never run on a GPU by us). Without it
everything is on the CPU, and no library of CUDA is loaded. Initial values, batches and dropout are
the same as on the CPU. Checkpoints do not depend on it: a job may go on elsewhere than it was saved.

Without a GPU, its driver, LibTorch's CUDA library or libdistrain_cuda.so the job ends with status 9
and says what is missing. `start` lines have the `device`; a rank that joins tells in `ready` what
rank 0 decides.
)"},
    {"CHECKPOINTS", R"(
With `--checkpoint DIR` rank 0 saves the job in a folder of its own for each save:

    DIR/step-000000000020/model.safetensors
    DIR/step-000000000020/optimizer.safetensors
    DIR/step-000000000020/manifest.json

The parameters have the names that PyTorch's modules give them, and any reader of safetensors opens
them. The manifest has sizes and checksums of the files, counters, the place in the data and the state
of the random numbers. A folder appears whole or not at all, whenever the process ends, and the last
two are kept, or as many as --keep says.

--resume goes on from there: with the same options a job ends, with `--mode sync` or --local, on the
CPU in the very parameters that it would have ended in without the break. A checkpoint that is
damaged, or of another job, is refused with exit status 7.

Training goes on while files are written. What changes meanwhile is copied before: rows of tables, and the
state of optimizers. The next save waits for the one before, and so does the end.

With `--max-restarts N` the launcher starts all its ranks again, N times at most, when one of them was
killed or lost, or short of memory or another resource; never after a crash of the program (SIGSEGV,
SIGABRT), wrong usage, bad data, a wrong token or a loss that is not finite. They go on from the newest checkpoint, and a `restart` line says so in the place of `error`. It waits for a
quarter of a second before, and twice as long each time that the job has got no further, up to half a
minute. On several machines each launcher starts its own ranks again, and they meet anew at rank 0; a
machine that does not come back is waited for until --join-timeout.

Where trainers share all that they train and do not wait for each other in each step (`ps` with
`--mode async` or `ssp`), the job goes on without one that is killed, lost or short of memory, as long as
--min-trainers are left. A `lost` line names it, and says how many steps it had made and how many it had
begun, which go to the others. A process that is started with its --rank, or with `--rank auto`, takes the
place, at any time before the job ends, and a `returned` line says so; one that had only been stopped
finds its place taken and ends with exit status 5. With `--max-restarts N` the launcher starts such ranks
again by themselves. A signal to one such trainer is a loss, too, if the job does not save.

On SIGINT (Ctrl-C), SIGTERM or SIGHUP a job with --checkpoint finishes its step, saves, and ends
within 60 s; a second signal, from 2 s after the first, ends it at once. What is signalled twice sooner
counts as signalled once, because a terminal, timeout(1) and service managers signal a process and its
group. It saves and ends, too, when standard output can be written no more: its reader went away, the
disk is full. A job without --checkpoint ends at once. SIGHUP is ignored under nohup(1).
)"},
    {"SIGNALS", R"(
SIGINT, SIGTERM and SIGHUP end a job: see CHECKPOINTS. SIGUSR1 has a job with --checkpoint save and go
on. On SIGQUIT (Ctrl-\) every rank says on standard error what it waits for, a line each: calls,
collectives, updates, ranks that are missing, the longest wait first; the job goes on. The launcher
passes signals on to its ranks. Ctrl-Z (SIGTSTP) stops the launcher and its ranks, until SIGCONT. Their
calls' time goes on (--rpc-timeout), and ranks elsewhere take them for lost after --peer-timeout.
)"},
    {"TRACES", R"(
With `--trace FILE` every rank records what it does: what its threads compute, the calls it makes and
answers, and its collectives. At the end of the job rank 0 gathers all that, brings it to one clock
and writes FILE in the Trace Event Format, a line for each event. Open it with ui.perfetto.dev or
chrome://tracing: a rank is a process there, an arrow leads from each call to the function that it
runs on another rank. Four million events of a job are kept, which its ranks share, at most one
million each; if there were more, a `warn` line says how many are missing.

The file appears at the end, whole, in the place of one that was there; where its name is a symbolic
link, what that leads to is written. That it can be written is seen to before any rank starts. Times
of ranks on several machines are off by about half of what a message takes there and back, but nothing
is shown to begin before what caused it.

When the job fails once it has begun, or a rank's part cannot be had at its end, the file has rank 0's
part alone; the exit status tells of either. When a signal ends the job before it could save, no file
is written. The calls that gather a trace do not count in the figures of `end`; the few that compare
the clocks when all ranks are there do.
)"},
    {"EXIT STATUS", R"(
* 0: success
* 1: internal error
* 2: wrong usage
* 3: the ranks could not be brought together: port taken, join timeout, rank taken, wrong size, options
that differ, another job or generation
* 4: wrong token, version or protocol
* 5: a peer was lost
* 6: a function that ran on another rank failed
* 7: bad data or a bad checkpoint
* 8: the loss is not finite; nothing is saved then
* 9: no resources: memory, file descriptors, disk; standard output full or closed
* 10: a call took longer than its deadline
* 11: the job ended in good order without its goal
* 128+n: ended by signal n; 137 when a rank was killed with SIGKILL, 143 after SIGTERM, 129 after
SIGHUP, 130 after SIGINT (by that signal itself, so that a loop of the shell ends, too), 141 when the
reader of standard output went away

The launcher exits with the status of the rank that failed first.
)"},
    {"ENVIRONMENT", R"(
Where no option says so, rank, number of ranks and address come from, first found wins:

* RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: as torchrun and Kubernetes set them; the address counts
with the other launchers, too
* OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE: Open MPI
* PMI_RANK, PMI_SIZE: MPICH's Hydra and others
* SLURM_PROCID, SLURM_NTASKS: inside a step of Slurm only (SLURM_STEP_ID)

The GPU of a rank with `--device cuda` comes from LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK,
MPI_LOCALRANKID or SLURM_LOCALID, when the process is one rank of a job. Others:

* TORCHELASTIC_USE_AGENT_STORE: True: torchrun itself listens on MASTER_PORT, so the ranks compute another
port from it
* LOCAL_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS, SLURM_STEP_NUM_NODES: whether all ranks are
on this host; then nobody listens on TCP unless an option asks for it
* OMP_NUM_THREADS: threads of one operation, unless --threads says otherwise
* DISTRAIN_TOKEN: the job's token, without --token-file; others may be able to read it
* TORCHELASTIC_RUN_ID, PMIX_NAMESPACE, SLURM_JOB_ID and SLURM_STEP_ID: what the launcher calls the job,
unless --job-id does; TORCHELASTIC_RESTART_COUNT (where all ranks are on one host), SLURM_RESTART_COUNT: how often it has
started the job again: ranks of another start are refused
* NO_COLOR: no colours in the progress
)"},
    {"FILES", R"(
* libdistrain_cuda.so: beside the program: what --device cuda loads
)"},
};

}  // namespace distrain::app
