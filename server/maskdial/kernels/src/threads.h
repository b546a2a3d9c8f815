// The session's threads, and how work is divided among them. No result depends on that.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "onnxruntime.h"
#include "tensor.h"
#include "trace.h"

// The threads of an operator's session: its configuration has them, since ONNX Runtime does not tell; otherwise
// those of the machine.
inline size_t session_threads(const OrtApi& api, const OrtKernelInfo* info) {
  OrtKeyValuePairs* entries = nullptr;
  check(api, api.KernelInfo_GetConfigEntries(info, &entries));
  const char* value = api.GetKeyValue(entries, "maskdial.threads");
  const size_t given = value == nullptr ? 0 : std::strtoul(value, nullptr, 10);
  api.ReleaseKeyValuePairs(entries);
  return given > 0 ? given : std::max(1u, std::thread::hardware_concurrency());
}

// Calls pass.kTask(i) for each i below num_tasks, on the session's threads; a single task runs on
// the caller's.
template <auto kTask, typename Pass>
void parallel(const OrtApi& api, OrtKernelContext* context, size_t num_tasks, Pass& pass) {
  const auto run = [](void* data, size_t task) { (static_cast<Pass*>(data)->*kTask)(task); };
  if (Trace& trace = Trace::instance(); trace.on) {
    trace.num_tasks = std::max<uint64_t>(trace.num_tasks, num_tasks);
    trace.num_barriers += num_tasks > 1;
  }
  if (num_tasks == 0) return;
  if (num_tasks == 1) return run(&pass, 0);
  check(api, api.KernelContext_ParallelFor(context, run, num_tasks, 0, &pass));
}

// With fewer tasks for each thread, some threads end long before the others.
constexpr size_t kTasksPerThread = 8;

// A task that does less takes no longer than the threads need to take it.
constexpr size_t kLeastFloats = 1024;

// The rows of a task that goes through rows of floats: at most max_rows, which one thread does sooner than
// several could begin.
inline size_t rows_per_task(size_t num_rows, size_t size, size_t max_rows, size_t num_threads) {
  max_rows = std::max<size_t>(1, max_rows);
  if (num_rows <= max_rows) return max_rows;
  const size_t each = (num_rows + num_threads - 1) / num_threads;
  return std::min(max_rows, std::max({each, kLeastFloats / size, size_t{1}}));
}

// How long the threads take for tasks of `size` units each and the time of `overhead` more for each task.
inline size_t makespan(size_t num_tasks, size_t size, size_t overhead, size_t num_threads) {
  return (num_tasks + num_threads - 1) / num_threads * (size + overhead);
}

// The size of tasks with the least makespan: `size`, half of it and so on. `num_tasks(size)` counts them.
template <typename Count>
size_t best_size(size_t size, size_t least, size_t overhead, size_t num_threads, Count num_tasks) {
  size_t best = size, tasks = num_tasks(size);
  size_t span = makespan(tasks, size, overhead, num_threads);
  while (size / 2 >= least && tasks < kTasksPerThread * num_threads) {
    size /= 2;
    tasks = num_tasks(size);
    if (const size_t its = makespan(tasks, size, overhead, num_threads); its < span) {
      best = size;
      span = its;
    }
  }
  return best;
}
