// The echo as the host engine.
#define ECHO_HOST
#include "echo.cpp"
