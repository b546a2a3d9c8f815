// How operators divide their work and how long they take, counted while a load test asks for it.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

// Calls of one operator that had as many tasks. Not for several sessions at a time.
struct Traced {
  const char* name;
  uint64_t num_tasks, num_barriers, num_calls, nanoseconds;
};

struct Trace {
  using Clock = std::chrono::steady_clock;

  bool on = false;
  std::vector<Traced> traced{};
  uint64_t num_tasks = 0, num_barriers = 0;  // of the operator that runs

  static Trace& instance() {
    static Trace trace;
    return trace;
  }

  void add(const char* name, Clock::time_point since) {
    const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - since);
    Traced* found = nullptr;
    for (Traced& each : traced) {
      if (each.num_tasks == num_tasks && std::strcmp(each.name, name) == 0) found = &each;
    }
    if (found == nullptr) {
      traced.push_back({name, num_tasks, 0, 0, 0});
      found = &traced.back();
    }
    found->num_barriers += num_barriers;
    found->nanoseconds += static_cast<uint64_t>(spent.count());
    ++found->num_calls;
    num_tasks = num_barriers = 0;
  }
};
