// The kernels' own source as a shared library: kernels are found by the name that NVRTC would be given.
#include <map>

#include "paged_attention.cu"

namespace {
template <class A>
A argument_of(void (*)(A));

using Runner = void (*)(const void*);
#define INSTANCE(...)                                                                                      \
  {#__VA_ARGS__, [](const void* arguments) {                                                               \
     __VA_ARGS__(*static_cast<const decltype(argument_of(&__VA_ARGS__))*>(arguments));                     \
   }},
const std::map<std::string, Runner> instances = {
#include "instances.inc"
};
std::string error;
}  // namespace

extern "C" const char* shim_run(const char* name, const unsigned grid[3], int threads, size_t shared_bytes, bool reversed,
                                const void* arguments) {
  const auto found = instances.find(name);
  if (found == instances.end()) {
    error = std::string("the test library has no ") + name;
  } else {
    const Runner runner = found->second;
    error = shim::launch({grid[0], grid[1], grid[2]}, threads, shared_bytes, reversed, [=] { runner(arguments); });
  }
  return error.empty() ? nullptr : error.c_str();
}

extern "C" size_t shim_bytes_of(const char* structure) {
  const std::map<std::string, size_t> sizes = {{"AttentionArguments", sizeof(AttentionArguments)},
                                               {"WriteArguments", sizeof(WriteArguments)},
                                               {"CopyArguments", sizeof(CopyArguments)}};
  return sizes.at(structure);
}
