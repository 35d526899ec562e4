// What a lock guards, in words that clang checks (-Wthread-safety; `make lint` runs it over native/core): a member that is
// touched without its lock does not compile there. The names are those of clang's own documentation. g++ reads nothing of it.
#pragma once

#if defined(__clang__)
#define KV_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define KV_THREAD_ATTRIBUTE(x)
#endif

// Of a class: it is a lock; it holds one while it lives.
#define CAPABILITY(x) KV_THREAD_ATTRIBUTE(capability(x))
#define SCOPED_CAPABILITY KV_THREAD_ATTRIBUTE(scoped_lockable)

// Of a member: touched, or what it points to, only by who holds the lock.
#define GUARDED_BY(x) KV_THREAD_ATTRIBUTE(guarded_by(x))
#define PT_GUARDED_BY(x) KV_THREAD_ATTRIBUTE(pt_guarded_by(x))

// Of a function: its caller holds the lock, or must not; it takes the lock and keeps it, or gives it back.
#define REQUIRES(...) KV_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) KV_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) KV_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) KV_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) KV_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
