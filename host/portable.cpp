// With portable.h: stand-ins for what the headers of a newer libstdc++ take from newer libraries. Both stay inside the engine.
#ifdef COLL_PORTABLE
#include <new>

// glibc 2.32: whether the process has one thread. Always false: reference counts are then always atomic.
extern "C" {
char __libc_single_threaded = 0;
}

namespace std {
// libstdc++ of GCC 11.
[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
