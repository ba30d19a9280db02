// Included before all else (-include) in what goes into wheels: binds to the oldest version of those functions of glibc
// that glibc has since given a newer one, so that a wheel that was built on a new system loads on older ones. The functions
// are the same: glibc 2.32 and 2.34 only moved them from libpthread and libdl into libc. tools/wheel.py links those two.
#pragma once
#include <features.h>

#define COLL_PORTABLE 1

#if defined(__GLIBC__) && defined(__x86_64__)
#define COLL_OLDEST(function, version) __asm__(".symver " #function "," #function "@GLIBC_" version)
#elif defined(__GLIBC__) && defined(__aarch64__)
#define COLL_OLDEST(function, version) __asm__(".symver " #function "," #function "@GLIBC_2.17")
#else
#define COLL_OLDEST(function, version) typedef int collOldest_##function
#endif

COLL_OLDEST(dlopen, "2.2.5");  // the versions of x86-64
COLL_OLDEST(dlsym, "2.2.5");
COLL_OLDEST(dlerror, "2.2.5");
COLL_OLDEST(pthread_condattr_setclock, "2.3.3");
COLL_OLDEST(pthread_setaffinity_np, "2.3.4");
COLL_OLDEST(pthread_setname_np, "2.12");
COLL_OLDEST(pthread_sigmask, "2.2.5");
