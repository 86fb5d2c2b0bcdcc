// The reference counts of libstdc++ read this flag of glibc 2.32 and skip atomic instructions while a process has one
// thread. With a flag of its own, always 0, the module also loads with an older glibc; it is hidden from other libraries.
extern "C" {
__attribute__((visibility("hidden"))) extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
