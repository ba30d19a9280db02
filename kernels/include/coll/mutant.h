// Errors that tests plant, to see that other tests notice them (tests/harness/test_mutants.py).
//
// COLL_MUTANT(n, right, wrong) is `right`. Compiled with -DCOLL_MUTANTS it is `wrong` in processes in
// which the environment variable COLL_MUTANT is n.
#ifndef COLL_MUTANT_H_
#define COLL_MUTANT_H_

#if defined(COLL_MUTANTS)
#include <stdlib.h>
static const int coll_mutant = getenv("COLL_MUTANT") ? atoi(getenv("COLL_MUTANT")) : 0;
#define COLL_MUTANT(n, right, wrong) (coll_mutant == (n) ? (wrong) : (right))
#else
#define COLL_MUTANT(n, right, wrong) (right)
#endif

#endif
