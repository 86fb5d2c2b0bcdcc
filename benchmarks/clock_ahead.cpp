// A preloaded library whose wall clock is an hour ahead. The monotonic clock, and with it every wait, stays as it is.
// (faketime shifts absolute waits as well, so that Python's time.sleep fails.)

#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

constexpr time_t kAhead = 3600;

extern "C" int clock_gettime(clockid_t clock, struct timespec* now) noexcept {
  static const auto real = reinterpret_cast<int (*)(clockid_t, struct timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));
  const int result = real(clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += kAhead;
  return result;
}

extern "C" int gettimeofday(struct timeval* now, void*) noexcept {
  struct timespec precise;
  const int result = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return result;
}

extern "C" time_t time(time_t* now) noexcept {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now) *now = precise.tv_sec;
  return precise.tv_sec;
}
