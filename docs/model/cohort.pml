/* The exclusive cohort on JetStream: slots, TTL leases, epoch consumers.  A model of the protocol, not of the code.
 *
 *   bucket    lease key  Lst Lown Lnon Lrev   TTL key: who owns the slot; Lnon = nonce of the acquisition, Lrev = revision
 *             state key  Sok Sep Sdone        key WITHOUT TTL: last epoch; floor + done-set (one mask, bit = message)
 *             plan       tgt[s]               slot -> member; members read it late (pl)
 *   server    CX[s] = set of existing epoch consumers; of each: start, delivered, acked, acks on their way, maker
 *   member    ph = phase of (member, slot); Q queued, R running, D ledger (done), Z still running after a fence;
 *             fz = drained by force, and something of it runs on
 *   ghosts    first (completed once), act/actn (newest epoch that pulled), fl (floor the server confirmed to the owner),
 *             wr (done according to a state that was written)
 * A freeze needs no action: any process may stay unscheduled anywhere, for any time, and go on with old beliefs.
 * late = the owner's own monotonic deadline passed.  With the margin the server expires a lease only after `late`;
 * with -DNOMARGIN (clock skew) it may at any time.
 *
 * PHASES  0 idle   8 acquire: result unknown   1 holds lease, reads   2 writes state, fenced by the lease
 *         3 create (workqueue: delete, create) 4 verifies the lease   5 deletes lower epochs           6 active
 *         7 draining   9 writes the done-set   10 releases            11 release: result unknown
 *
 * SIZES   -DMEM members -DS slots -DN messages a slot (key = parity) -DMOVES plan changes -DF faults -DBL bucket faults
 *         -DCK checkpoints
 * RET     0 limits   1 workqueue   2 interest
 * KINDS   1 crash   2 lapse   4 unknown CAS result   8 acks lost   16 delivery lost   32 server forgets acks (R1 kill)
 *         64 a drain that took too long is forced
 * BLK     1 bucket lost   2 bucket falls back to before the last acquisition
 * RULES   the members themselves write the plan: ver[i] = highest plan rules that member i knows (0 = former code, which knows no
 *         other), hb[i] = its heartbeat (0 absent, 1 + ver).  Without it any plan may be written at any time
 * PROPS   which properties to check: 1 (a) overlap  2 (b) order  4 (d) clean  8 (e) stale ack  16 (f) epoch  32 (c)(g) end  64 (h) floor
 *         128 (i) written  256 (j) the plan follows the lowest rules alive
 * P_...   a step as first planned;  X_... a mutant that must be caught;  REACH=n  "state n is never seen" (must fail) */
#ifndef MEM
#define MEM 2
#endif
#ifndef S
#define S 1
#endif
#ifndef N
#define N 3
#endif
#ifndef F
#define F 1
#endif
#ifndef BL
#define BL 0
#endif
#ifndef BLK
#define BLK 1
#endif
#ifndef MOVES
#define MOVES 1
#endif
#ifndef CK              /* checkpoints: the whole ledger written while the slot is owned */
#define CK 1
#endif
#ifndef RET
#define RET 0
#endif
#ifndef KINDS
#define KINDS 127
#endif
#ifndef EPSRC           /* epoch: 0 record + 1;  1 also above every consumer;  2 also above the server's clock in ms */
#define EPSRC 2
#endif
#ifndef PROPS
#define PROPS 511
#endif
#define CHECK(p,c) assert(!((PROPS)&(p)) || (c))
#ifndef REACH
#define REACH 0
#endif
#define E 8             /* epochs 0..7; consumer e0 was made by the set-up, before the first publish */
#define SEEN(n) assert(REACH!=n)
#define ALL ((1<<N)-1)
#define BIT(m) (1<<(m))
#define BELOW(m) ((1<<(m))-1)
#define SAME(m) (((m)&1) -> 10 : 5)
#define OLDER(m) (SAME(m)&BELOW(m))
#define PRE(a) (((a)&1) -> (((a)&2) -> (((a)&4) -> (((a)&8) -> 15 : 7) : 3) : 1) : 0)       /* contiguous prefix */
#define LOW(a) (((a)&1) -> 1 : (((a)&2) -> 2 : (((a)&4) -> 4 : 8)))
#define LOWN(a) (((a)&1) -> 0 : (((a)&2) -> 1 : (((a)&4) -> 2 : (((a)&8) -> 3 : (((a)&16) -> 4 : (((a)&32) -> 5 : (((a)&64) -> 6 : 7)))))))
#define TOPN(a) (((a)&128) -> 7 : (((a)&64) -> 6 : (((a)&32) -> 5 : (((a)&16) -> 4 : (((a)&8) -> 3 : (((a)&4) -> 2 : (((a)&2) -> 1 : 0)))))))
#define MAX(a,b) ((a)>(b) -> (a) : (b))
#define HOLE(q,d) ((((q)&1) && (d)>1) || (((q)&2) && (d)>3) || (((q)&4) && (d)>7))          /* queued below the highest done */
#define X (i*S+s)
#define C(e) (s*E+(e))
#define CAN(k) (((KINDS)&(k)) && flt>0)
#define CLEAN (flt==F && bl==BL)
bool Lst[S], Sok[S]; byte Lown[S], Lnon[S], Lrev[S], Sep[S], Sdone[S], tgt[S];              /* bucket */
byte CX[S], gone[S], Cst[S*E], Cdel[S*E], Cack[S*E], Cfly[S*E], Cby[S*E]; bool Cgap[S*E];   /* server */
bool up[MEM], young, late[MEM*S], fz[MEM*S]; byte pl[MEM*S], ph[MEM*S], ep[MEM*S], non[MEM*S], rev[MEM*S], Q[MEM*S], R[MEM*S], D[MEM*S], Z[MEM*S];
#if BL>1                 /* each member waits by itself: 1 waits 2 has waited; the consumers before the wait; who had lost its lease then */
#define WAITS 1
byte wt[MEM*S], svy[MEM*S], du[MEM*S];
#define LOST(x) (HOLDS(x) && !RECMINE(x))
#define TRUSTED (wt[X]==2)
#ifdef X_ONEWAIT                                   /* who has waited once trusts a missing state for ever */
#define KNOWN 1
#else
#define KNOWN (Sok[s] || CX[s]==svy[X])
#endif
#define OWNED svy[X]=0; du[X]=0; wt[X]=0
#define ANEW k=0; do :: k<MEM -> du[k*S+s]=du[k*S+s]&~BIT(i); k++ :: else -> break od; k=0   /* its new lease has a deadline of its own */
#else
#define WAITS 0
#define TRUSTED !young
#define KNOWN 1
#define OWNED skip
#define ANEW skip
#endif
byte airn[MEM*S], aira[MEM*S], airl[MEM*S];        /* KV writes on their way after the client gave up on the reply */
#if CK>0
byte airs[MEM*S], aird[MEM*S], ck=CK;              /* the same of a checkpoint: the revision it is fenced by, what it says */
#define FRESH (airs[X]==0 || airs[X]!=rev[X])      /* no checkpoint is on its way that the present revision lets through */
#define LANDS(j) :: d_step { j<MEM && airs[j*S+s]!=0 -> \
      if :: (Lst[s] && Lrev[s]==airs[j*S+s]) -> SEEN(20); Sdone[s]=aird[j*S+s]; wr[s]=wr[s]|Sdone[s] :: else fi; airs[j*S+s]=0; aird[j*S+s]=0 } \
 :: d_step { j<MEM && airs[j*S+s]!=0 -> airs[j*S+s]=0; aird[j*S+s]=0 }
#else
#define FRESH 1
#define LANDS(j)
#endif
#ifdef X_STALESAVE
#undef FRESH
#define FRESH 1
#endif
byte flt=F, bl=BL, mv=MOVES, nonce, clk, first[S], act[S], actn[S], fl[S], wr[S];
#define SAVE Sdone[s]=D[X]; wr[s]=wr[s]|D[X]
#if BL>0 && BLK==2
bool pSok[S]; byte pLst[S], pLown[S], pLnon[S], pLrev[S], pSep[S], pSdone[S];               /* what a regression brings back */
#define KEEP pLst[s]=Lst[s]; pSok[s]=Sok[s]; pLown[s]=Lown[s]; pLnon[s]=Lnon[s]; pLrev[s]=Lrev[s]; pSep[s]=Sep[s]; pSdone[s]=Sdone[s]
#else
#define KEEP skip
#endif
#define RECMINE(x) (Lst[s] && Lnon[s]==non[x])
#define MINE RECMINE(X)
#ifdef P_REVONLY
#define CASOK (Lst[s] && Lrev[s]==rev[X])          /* CAS on the bare revision; the content is never read back */
#else
#define CASOK (MINE && Lrev[s]==rev[X])
#endif
#ifdef P_UNFENCED                                  /* the state is written whoever holds the lease */
#define FENCED 1
#else
#define FENCED CASOK
#endif
#define HOLDS(x) (ph[x]!=0 && ph[x]!=8)
#define CLEAR Q[X]=0; R[X]=0; D[X]=0; ep[X]=0; non[X]=0; rev[X]=0; late[X]=0; fz[X]=0; ph[X]=0
#define FENCE Z[X]=Z[X]|R[X]; CLEAR
#define WRITE KEEP; nonce++; Lst[s]=1; Lown[s]=i; Lnon[s]=nonce; Lrev[s]=Lrev[s]+1; non[X]=nonce; rev[X]=Lrev[s]
#define MYC C(ep[X])
#define HAVEC (CX[s]&BIT(ep[X]))
#define AV (ALL & ~(gone[s]|Cst[MYC]|Cdel[MYC]|Cack[MYC]))                                  /* not yet delivered by my consumer */
#define OWED (ALL & Cdel[MYC] & ~(gone[s]|Cst[MYC]|Cack[MYC]|Cfly[MYC]|Q[X]|R[X]|D[X]))      /* delivered, unknown to me, AckWait will bring it */
#define DROP(e) CX[s]=CX[s]&~BIT(e); Cst[C(e)]=0; Cdel[C(e)]=0; Cack[C(e)]=0; Cfly[C(e)]=0; Cby[C(e)]=0; Cgap[C(e)]=0
#ifdef X_DELANY
#define OLD (CX[s]&~BIT(ep[X]))
#else
#define OLD (CX[s]&BELOW(ep[X]))
#endif
#if RET==1 || defined(P_DELFIRST)
#define DELFIRST 1
#else
#define DELFIRST 0
#endif
/* interest: a message leaves the stream when every existing consumer has acked it; with no consumer, at once */
#if RET==2
#define REGONE t=ALL; k=0; do :: k<E -> if :: (CX[s]&BIT(k)) -> t=t&(Cack[C(k)]|Cst[C(k)]) :: else fi; k++ :: else -> break od; gone[s]=gone[s]|t; t=0; k=0
#else
#define REGONE skip
#endif
#ifdef X_WATCH
#define INTIME 1                                   /* no clock of its own, no failed renewal: waits for a watch event */
#else
#define INTIME (!late[X])
#endif
/* (a) two unfenced handlers of one key: never with the margin; without it only while one of the two has lost its lease */
#ifdef X_WATCH
#define MAYOVERLAP(x) 0
#define MUSTHOLD 1
#elif defined(NOMARGIN) || (BL>0 && BLK==2)
#define MAYOVERLAP(x) (late[x] || !RECMINE(x) || !MINE)
#define MUSTHOLD 1
#else
#define MAYOVERLAP(x) late[x]
#define MUSTHOLD (BL>0 || MINE)
#endif
#if defined(NOMARGIN) || defined(X_WATCH) || BL>0  /* (i) needs one owner at a time, and a bucket that keeps */
#define NOWRITTEN 1
#else
#define NOWRITTEN 0
#endif
#ifdef P_NODEDUPE                                  /* the done-set is used on limits only */
#define HANDED (RET==0 -> Sdone[s] : 0)
#else
#define HANDED Sdone[s]
#endif
#define FIRST(m) CHECK(2,(OLDER(m)&~first[s])==0); first[s]=first[s]|BIT(m)                  /* (b) first completions in order */
#ifdef ALT_NOPREFIX                                /* drain = wait for the running ones only */
#define INDRAIN(m) 0
#define DRAINED (R[X]==0)
#else
#define INDRAIN(m) (((R[X]|D[X])>>(m))!=0)
#define DRAINED (R[X]==0 && !HOLE(Q[X],D[X]))
#endif
#ifdef X_RELRUNNING                                /* released although handlers of it still run */
#define ENDED 1
#else
#define ENDED (!fz[X])
#endif
/* in phases 1 to 5 something is queued only in a takeover from myself: it came before the gap, and may start */
#define STARTABLE(m) ((Q[X]&BIT(m)) && ((ph[X]>=1 && ph[X]<=6) || (ph[X]==7 && INDRAIN(m))) && INTIME && ((Q[X]|R[X]|Z[X])&OLDER(m))==0 && ((R[X]|Z[X])&SAME(m))==0)
#define START(m) d_step { m<N && up[i] && STARTABLE(m) -> \
    CHECK(2,(OLDER(m)&~first[s])==0);              /* (b) no older unfinished message of the key */ \
    CHECK(1,MUSTHOLD); \
    if :: (first[s]&BIT(m)) -> SEEN(2); CHECK(4,!CLEAN); CHECK(64,!(fl[s]&BIT(m)) || ((KINDS)&32) || BL>0); \
         CHECK(128,!(wr[s]&BIT(m)) || NOWRITTEN) :: else fi; /* (d) (h) (i) */ \
    k=0; do :: k<MEM -> if :: (k!=i && (R[k*S+s]&SAME(m))) -> SEEN(1); if :: late[k*S+s] -> skip :: else -> SEEN(16) fi; CHECK(1,MAYOVERLAP(k*S+s)) :: else fi; k++ :: else -> break od; k=0; /* (a) */ \
    if :: R[X]!=0 -> SEEN(13) :: else fi; if :: ph[X]<6 -> SEEN(21) :: else fi; Q[X]=Q[X]&~BIT(m); R[X]=R[X]|BIT(m) }
#define DONE(m) d_step { m<N && up[i] && (R[X]&BIT(m)) -> FIRST(m); R[X]=R[X]&~BIT(m); D[X]=D[X]|BIT(m) }
#define ZDONE(m) d_step { m<N && up[i] && (Z[X]&BIT(m)) -> if :: (first[s]&BIT(m)) -> SEEN(11) :: else fi; FIRST(m); Z[X]=Z[X]&~BIT(m) }
proctype Member(byte i; byte s) { byte k, t;
end: do
 :: d_step { up[i] && pl[X]!=tgt[s] -> pl[X]=tgt[s] }                                       /* reads the plan, late */
 /* 1 ACQUIRE: planned for me (as I last read), lease absent; a bucket without my slot's state is new or lost: wait one TTL (young) */
 :: d_step { up[i] && ph[X]==0 && pl[X]==i &&
#ifndef X_NOWAIT
      !Lst[s] &&
#endif
#ifndef P_NOGRACE
      (Sok[s] || TRUSTED) &&
#endif
      nonce<20 -> if :: tgt[s]!=i -> SEEN(18) :: else fi; ANEW; WRITE; ph[X]=1 }
 :: d_step { up[i] && ph[X]==0 && pl[X]==i && !Lst[s] && (Sok[s] || TRUSTED) && CAN(4) && airn[X]==0 && nonce<20 ->
      ANEW; flt--; nonce++; non[X]=nonce; rev[X]=Lrev[s]+1; airn[X]=nonce; aira[X]=Lrev[s]; ph[X]=8 }  /* no reply: the write lands now, later or never */
 :: d_step { up[i] && ph[X]==8 ->
#ifdef X_IGNUNK
      ph[X]=1
#else
      if :: MINE -> ph[X]=1 :: else -> CLEAR fi                                             /* read back, compare the nonce */
#endif
    }
#if WAITS
 /* no state: list the consumers, then wait until whoever has lost its lease by now has reached its deadline */
 :: d_step { up[i] && ph[X]==0 && pl[X]==i && !Lst[s] && !Sok[s] && wt[X]==0 -> svy[X]=CX[s]; wt[X]=1;
      k=0; do :: k<MEM -> if :: LOST(k*S+s) -> du[X]=du[X]|BIT(k) :: else fi; k++ :: else -> break od; k=0 }
 :: d_step { up[i] && wt[X]==1 -> wt[X]=2;
      k=0; do :: k<MEM -> if :: ((du[X]&BIT(k)) && LOST(k*S+s)) -> late[k*S+s]=1 :: else fi; k++ :: else -> break od; k=0; du[X]=0 }
 /* other consumers than before the wait: another member owned the slot meanwhile, and the bucket was lost again */
 :: d_step { up[i] && ph[X]==1 && !KNOWN -> SEEN(29); OWNED; FENCE }
#endif
 /* 2 READ state and consumers, choose the epoch */
 :: d_step { up[i] && KNOWN && ph[X]==1 -> t=TOPN(CX[s]);
      if :: (OLD!=0 && (CX[s]&(CX[s]-1))!=0) -> SEEN(7) :: else fi;
      D[X]=D[X]|HANDED; if :: (RET!=1 && CX[s]!=0) -> D[X]=D[X]|PRE(Cack[C(t)]|Cst[C(t)]) :: else fi;
#ifdef X_NOBARRIER
      ep[X]=t; t=0; ph[X]=6 }
#else
#ifdef X_NOBUMP
      ep[X]=MAX(Sep[s],t);
#else
      ep[X]=(EPSRC==0 -> Sep[s] : (EPSRC==1 -> MAX(Sep[s],t) : MAX(clk,MAX(Sep[s],t))))+1;
#endif
#ifdef CUT
      if :: ep[X]>=E -> ep[X]=0; up[i]=0 :: else fi;                                        /* livelock cut: only to see what else a mutant breaks */
#endif
      clk=MAX(clk,ep[X]); assert(ep[X]<E); t=0; ph[X]=2 }
#endif
 /* 3 WRITE state {epoch, floor, done} on condition that the lease revision is mine (cross-subject fence) */
 :: d_step { up[i] && ph[X]==2 && FRESH -> if :: FENCED -> Sep[s]=ep[X]; Sok[s]=1; OWNED;
#ifndef X_NODONE
      SAVE;
#endif
      ph[X]=3 :: else -> SEEN(8); FENCE fi }
 /* 4 CREATE strictly (workqueue refuses overlapping filters, so there the lower ones go first) */
 :: d_step { up[i] && ph[X]==3 && DELFIRST && OLD!=0 -> t=LOWN(OLD); DROP(t); t=0; REGONE }
 :: d_step { up[i] && ph[X]==3 && !(DELFIRST && OLD!=0) ->
      if :: (CX[s]&BIT(ep[X])) -> SEEN(5);
#ifdef P_UPSERT
            ph[X]=4
#else
            if :: Cby[MYC]==i+1 -> ph[X]=4 :: else -> ph[X]=1 fi                            /* name taken by another nonce: next epoch */
#endif
         :: (RET==1 && CX[s]!=0 && !(CX[s]&BIT(ep[X]))) -> SEEN(10); FENCE                  /* a higher epoch lives: I am the old one */
         :: else -> CX[s]=CX[s]|BIT(ep[X]); Cby[MYC]=i+1; Cst[MYC]=(RET==1 -> 0 : PRE(D[X])); ph[X]=4 fi }
 /* 5 VERIFY by a CAS renewal that the lease is still mine */
 :: d_step { up[i] && ph[X]==4 ->
#ifdef P_NOVERIFY
      ph[X]=5
#else
      if :: CASOK -> ph[X]=5 :: else -> SEEN(9); FENCE fi
#endif
    }
 /* 6 DELETE lower epochs only, then pull */
#ifdef X_PULLFIRST
 :: d_step { up[i] && ph[X]==5 -> ph[X]=6 }
#else
 :: d_step { up[i] && ph[X]==5 && OLD!=0 -> t=LOWN(OLD); DROP(t); t=0; REGONE }
 :: d_step { up[i] && ph[X]==5 && OLD==0 -> ph[X]=6 }
#endif
 :: d_step { up[i] && ph[X]==6 && OLD!=0 -> SEEN(4); t=LOWN(OLD); DROP(t); t=0; REGONE }     /* late-made garbage: swept */
 /* ACTIVE: pull in sequence order; drop what is done; a delivery-number gap means one got lost: take over from myself */
 :: d_step { up[i] && ph[X]==6 && !HAVEC -> SEEN(14); FENCE }                               /* 503: my consumer is gone: lost */
 :: d_step { up[i] && ph[X]==6 && HAVEC && AV!=0 -> 
      if :: ep[X]==act[s] -> CHECK(16,actn[s]==non[X]) :: else -> CHECK(16,ep[X]>act[s]); act[s]=ep[X]; actn[s]=non[X] fi; /* (f) */
#ifndef P_NOGAP
      if :: Cgap[MYC] -> SEEN(6); ph[X]=1 :: else ->
#endif
      t=LOW(AV); Cdel[MYC]=Cdel[MYC]|t; if :: ((Q[X]|R[X]|D[X])&t) -> SEEN(3) :: else -> Q[X]=Q[X]|t fi; t=0
#ifndef P_NOGAP
      fi
#endif
    }
 :: d_step { up[i] && ph[X]==6 && HAVEC && AV!=0 && CAN(16) && Cgap[MYC]==0 -> flt--; t=LOW(AV); Cdel[MYC]=Cdel[MYC]|t; t=0; Cgap[MYC]=1 }
 :: d_step { up[i] && ph[X]==6 && HAVEC && OWED!=0 ->
#ifndef P_NOGAP
      if :: Cgap[MYC] -> ph[X]=1 :: else ->
#endif
      t=LOW(OWED); Q[X]=Q[X]|t; t=0
#ifndef P_NOGAP
      fi
#endif
    }
 :: START(0) :: START(1) :: START(2) :: START(3)
 :: DONE(0) :: DONE(1) :: DONE(2) :: DONE(3)
 :: ZDONE(0) :: ZDONE(1) :: ZDONE(2) :: ZDONE(3)
 :: d_step { up[i] && (ph[X]==6 || ph[X]==7) && HAVEC && (D[X]&Cdel[MYC]&~(Cack[MYC]|Cst[MYC]|Cfly[MYC]))!=0 -> Cfly[MYC]=Cfly[MYC]|(D[X]&Cdel[MYC]&~(Cack[MYC]|Cst[MYC])) }
 /* LOSS: own deadline, or a renewal that finds another record.  A renewal of unknown result is read back and adopted */
#ifndef X_WATCH
 :: d_step { up[i] && HOLDS(X) && (late[X] || !MINE) ->
#ifdef X_RENEWLOST
      late[X]=0; WRITE }
#else
      FENCE }
#endif
#endif
 :: d_step { up[i] && ph[X]==6 && MINE && Lrev[s]==rev[X] && CAN(4) -> flt--; Lrev[s]=Lrev[s]+1 }
#ifdef P_RENEWUNK
 :: d_step { up[i] && HOLDS(X) && MINE && Lrev[s]!=rev[X] -> assert(0); FENCE }              /* 10071 on my own write: a false loss */
#else
 :: d_step { up[i] && HOLDS(X) && MINE && Lrev[s]!=rev[X] -> rev[X]=Lrev[s] }
#endif
#if CK>0
 /* CHECKPOINT: the whole ledger, under the same fence.  No reply: renew before the next state write, so that it cannot come behind it */
 :: d_step { up[i] && (ph[X]==6 || ph[X]==7) && ck>0 && FRESH && D[X]!=Sdone[s] ->
#ifdef X_CKUNFENCED
      ck--; Sdone[s]=D[X]; wr[s]=wr[s]|D[X] }
#else
      if :: CASOK -> ck--; SEEN(19); SAVE :: else -> FENCE fi }
#endif
 :: d_step { up[i] && (ph[X]==6 || ph[X]==7) && ck>0 && airs[X]==0 && D[X]!=Sdone[s] && CASOK && CAN(4) -> flt--; ck--; airs[X]=rev[X]; aird[X]=D[X] }
 :: d_step { up[i] && HOLDS(X) && !FRESH && CASOK -> Lrev[s]=Lrev[s]+1; rev[X]=Lrev[s] }
#endif
 /* DRAIN: prefix-closing; write the ledger; release; never resume after a release was sent */
 :: d_step { up[i] && ph[X]==6 && pl[X]!=i -> ph[X]=7 }
 :: d_step { up[i] && ph[X]==7 && pl[X]==i && Lst[s] -> ph[X]=6 }
#ifdef X_RELFIRST
 :: d_step { up[i] && ph[X]==7 && MINE -> SAVE; Lst[s]=0; Lnon[s]=0 }
#else
 :: d_step { up[i] && ph[X]==7 && DRAINED -> ph[X]=9 }
#endif
 /* FORCED: what runs is cancelled; what does not end keeps its lane, and the lease, which then is left to run out */
 :: d_step { up[i] && ph[X]==7 && R[X]!=0 && CAN(64) -> flt--; SEEN(22); R[X]=0; ph[X]=9 }
 :: d_step { up[i] && ph[X]==7 && R[X]!=0 && CAN(64) -> flt--; SEEN(23); fz[X]=1; Z[X]=Z[X]|R[X]; R[X]=0; ph[X]=9 }
 :: d_step { up[i] && ph[X]==9 && FRESH -> if :: CASOK ->
#ifndef X_NODONE
      SAVE; if :: D[X]!=PRE(D[X]) -> SEEN(12) :: else fi;
#endif
      ph[X]=10 :: else -> FENCE fi }
 :: d_step { up[i] && ph[X]==10 && ENDED -> if :: CASOK -> CHECK(1,!fz[X]); Lst[s]=0; Lnon[s]=0; CLEAR :: else -> FENCE fi }
 :: d_step { up[i] && ph[X]==10 && !ENDED && !late[X] -> late[X]=1 }
 :: d_step { up[i] && ph[X]==10 && ENDED && CASOK && CAN(4) && airl[X]==0 -> flt--; airl[X]=rev[X]; ph[X]=11 }
#ifdef X_RESUME
 :: d_step { up[i] && ph[X]==11 && pl[X]==i -> ph[X]=6 }                                    /* "the release got lost, so I go on" */
#endif
 :: d_step { up[i] && ph[X]==11 -> if :: MINE -> ph[X]=10 :: else -> CLEAR fi }
#ifdef X_ADOPT
 :: d_step { up[i] && ph[X]==0 && Lst[s] && Lown[s]==i && pl[X]==i -> non[X]=Lnon[s]; rev[X]=Lrev[s]; ep[X]=TOPN(CX[s]); D[X]=Sdone[s]; ph[X]=6 }
#endif
 /* the owner's own clock */
#ifdef NOMARGIN
 :: d_step { HOLDS(X) && !late[X] && !MINE -> late[X]=1 }
#else
 :: d_step { HOLDS(X) && !late[X] && CAN(2) -> flt--; late[X]=1 }
#endif
 od }
#ifdef RULES
/* a plan is a function of the live members and of the rules: by rules 0 the first of them, by rules 1 the last (of two or three) */
byte ver[MEM], hb[MEM]; bool dirty[MEM], same[MEM];   /* same = no plan was written since my read: the compare-and-set succeeds */
#if MEM>2
#define HB2 hb[2]
#define NEWS dirty[0]=1; dirty[1]=1; dirty[2]=1
#define PUT(m) tgt[0]=m; same[0]=0; same[1]=0; same[2]=0; NEWS
#else
#define HB2 0
#define NEWS dirty[0]=1; dirty[1]=1
#define PUT(m) tgt[0]=m; same[0]=0; same[1]=0; NEWS
#endif
#define LAST_ALIVE (HB2 -> 2 : (hb[1] -> 1 : 0))
#define FIRST_ALIVE (hb[0] -> 0 : (hb[1] -> 1 : 2))
#define ANY (hb[0] || hb[1] || HB2)
#define OLD_ALIVE (hb[0]==1 || hb[1]==1 || HB2==1)
#define NEW_ALIVE (hb[0]==2 || hb[1]==2 || HB2==2)
#if defined(X_OWNRULES)
#define BY (ver[i])                                /* each member by the highest rules that it knows itself */
#elif defined(X_HIGHEST)
#define BY (ver[i]==0 -> 0 : NEW_ALIVE)            /* by the highest alive: the former code cannot follow */
#elif defined(X_STICKY)
#define BY (ver[i]==0 -> 0 : (was -> 1 : !OLD_ALIVE))  /* once by the new rules, always: an old member that returns fights */
#else
#define BY (ver[i]==0 -> 0 : !OLD_ALIVE)           /* by the lowest alive; the former code reads no version */
#endif
#define WANTED (OLD_ALIVE -> FIRST_ALIVE : LAST_ALIVE)
proctype Planner(byte i) { byte want, old, st; bool was;
end: do
 :: d_step { up[i] && st==0 && dirty[i] -> dirty[i]=0; same[i]=1; old=tgt[0]; st=1 }           /* reads the plan first, */
 :: d_step { up[i] && st==1 && ANY -> want=(BY -> LAST_ALIVE : FIRST_ALIVE); if :: BY -> was=1 :: else fi; st=2 }  /* then the heartbeats */
 :: d_step { up[i] && st==1 && !ANY -> same[i]=0; old=0; st=0 }
 :: d_step { up[i] && st==2 && want==old -> same[i]=0; want=0; old=0; st=0 }
 :: d_step { up[i] && st==2 && want!=old -> if :: same[i] -> PUT(want); if :: was -> SEEN(24) :: else fi
      :: else -> SEEN(25); dirty[i]=1 fi; same[i]=0; want=0; old=0; st=0 }                       /* compare-and-set: another plan came first */
 :: d_step { !up[i] && st+was!=0 -> same[i]=0; want=0; old=0; st=0; was=0 }
 /* heartbeat: written again when it is missing; expires with the process, and in a freeze */
 :: d_step { up[i] && hb[i]==0 -> hb[i]=1+ver[i]; NEWS }
 :: d_step { up[i] && hb[i]!=0 && CAN(2) -> flt--; hb[i]=0; NEWS }
 :: d_step { !up[i] && hb[i]!=0 -> hb[i]=0; NEWS }
 od }
#define REBOOT(v) d_step { !up[i] && hb[i]==0 -> if :: (ver[i]!=v && OLD_ALIVE) -> SEEN(26) :: else fi; \
      if :: (v==0 && NEW_ALIVE && !OLD_ALIVE) -> SEEN(27) :: else fi; ver[i]=v; up[i]=1 }
#endif
#if WAITS
#define UNWAIT(x) wt[x]=0; svy[x]=0; du[x]=0;
#else
#define UNWAIT(x)
#endif
#define WIPE(s_) UNWAIT(i*S+s_) ph[i*S+s_]=0; Q[i*S+s_]=0; R[i*S+s_]=0; D[i*S+s_]=0; Z[i*S+s_]=0; ep[i*S+s_]=0; non[i*S+s_]=0; rev[i*S+s_]=0; late[i*S+s_]=0; fz[i*S+s_]=0; pl[i*S+s_]=MEM
proctype Host(byte i) {
end: do
 :: d_step { CAN(1) && up[i] -> flt--; up[i]=0; WIPE(0);
#if S>1
      WIPE(1);
#endif
    }
#ifdef RULES                                                                                /* back with the same code, the next, or the former */
 :: REBOOT(0) :: REBOOT(1)
#else
 :: d_step { !up[i] -> up[i]=1 }
#endif
 od }
/* a write in the air lands (CAS decides) or is lost; a crash does not call it back */
#define LAND(j) d_step { j<MEM && airn[j*S+s]!=0 -> if :: (!Lst[s] && Lrev[s]==aira[j*S+s]) -> Lst[s]=1; Lown[s]=j; Lnon[s]=airn[j*S+s]; \
      Lrev[s]=Lrev[s]+1 :: else fi; airn[j*S+s]=0; aira[j*S+s]=0 } \
 :: d_step { j<MEM && airl[j*S+s]!=0 -> if :: (Lst[s] && Lrev[s]==airl[j*S+s]) -> Lst[s]=0; Lnon[s]=0 :: else fi; airl[j*S+s]=0 } \
 :: d_step { j<MEM && (airn[j*S+s]!=0 || airl[j*S+s]!=0) -> airn[j*S+s]=0; aira[j*S+s]=0; airl[j*S+s]=0 }
#define OWNX (Lown[s]*S+s)
#define APPLY(e) d_step { Cfly[C(e)]!=0 -> CHECK(8,e>=act[s]); if :: (HOLDS(OWNX) && ep[OWNX]>e) -> SEEN(17) :: else fi; /* (e) */ \
    Cack[C(e)]=Cack[C(e)]|Cfly[C(e)]; Cfly[C(e)]=0; if :: RET==1 -> gone[s]=gone[s]|Cack[C(e)] :: else fi; \
    if :: (Lst[s] && RECMINE(OWNX) && ph[OWNX]==6 && ep[OWNX]==e && RET!=1) -> fl[s]=fl[s]|PRE(Cack[C(e)]|Cst[C(e)]) :: else fi; REGONE }
#define LOSE(e) d_step { Cfly[C(e)]!=0 && CAN(8) -> flt--; Cfly[C(e)]=0 }
#define FORGET(e) d_step { Cack[C(e)]!=0 && CAN(32) -> flt--; if :: RET==1 -> gone[s]=gone[s]&~Cack[C(e)] :: else fi; Cack[C(e)]=0; Cdel[C(e)]=0 }
#define NET(e) APPLY(e) :: LOSE(e) :: FORGET(e)
proctype Server(byte s) { byte k, t;
end: do
 :: d_step { Lst[s] &&
#ifdef NOMARGIN
      (!HOLDS(OWNX) || !RECMINE(OWNX) || late[OWNX] || CAN(2)) -> if :: (HOLDS(OWNX) && RECMINE(OWNX) && !late[OWNX]) -> flt-- :: else fi;
#else
      (!HOLDS(OWNX) || !RECMINE(OWNX) || late[OWNX]) ->
#endif
#ifdef P_ONEKEY
      Sep[s]=0; Sdone[s]=0;                                                                /* epoch and done-set sat in the expiring key */
#endif
      Lst[s]=0; Lnon[s]=0 }
#if (KINDS)&4
 :: LAND(0) :: LAND(1) :: LAND(2) LANDS(0) LANDS(1) LANDS(2)
#endif
 :: NET(0) :: NET(1) :: NET(2) :: NET(3) :: NET(4) :: NET(5) :: NET(6)
 od }
#define RETARGET(j) d_step { j<MEM && up[j] && tgt[s]!=j && (mv>0 || !up[tgt[s]]) -> if :: up[tgt[s]] -> mv-- :: else fi; tgt[s]=j }
proctype Plan(byte s) {
end: do
#ifdef PURE                                                                                 /* the pure function itself, 2 members */
 :: d_step { up[0] && up[1] && tgt[s]!=s%2 -> tgt[s]=s%2 }
 :: d_step { up[0] && !up[1] && tgt[s]!=0 -> tgt[s]=0 }
 :: d_step { !up[0] && up[1] && tgt[s]!=1 -> tgt[s]=1 }
#else
 :: RETARGET(0) :: RETARGET(1) :: RETARGET(2)                                               /* any plan at all */
#endif
 od }

#if BL>0
/* the slowest owner has reached its deadline one TTL after the bucket was lost */
#define AGED(x) if :: (HOLDS(x) && !(Lst[s] && Lnon[s]==non[x])) -> late[x]=1 :: else fi
proctype Bucket(byte s) {
end: do
#if BLK==1
 :: d_step { bl>0 -> bl--; Lst[s]=0; Lnon[s]=0;
#ifdef P_REVRESTART                                                                         /* else the new bucket's first_seq lies above */
      Lrev[s]=0;
#endif
      Sok[s]=0; Sep[s]=0; Sdone[s]=0;
#if WAITS
    }
#else
      young=1 }
 :: d_step { young -> young=0; AGED(0); AGED(1);
#if MEM>2
      AGED(2);
#endif
    }
#endif
#else
 :: d_step { bl>0 -> bl--; Lst[s]=pLst[s]; Sok[s]=pSok[s]; Lown[s]=pLown[s]; Lnon[s]=pLnon[s]; Lrev[s]=pLrev[s]; Sep[s]=pSep[s]; Sdone[s]=pSdone[s] }
#endif
 od }
#endif

/* (c) (g) when nothing can happen any more, everything is completed and acked, the planned member owns the slot, no garbage is left */
#define OK(s_) (first[s_]==ALL && Lst[s_] && Lown[s_]==tgt[s_] && ph[tgt[s_]*S+s_]==6 && CX[s_]==BIT(ep[tgt[s_]*S+s_]) \
   && ((gone[s_]|Cst[s_*E+ep[tgt[s_]*S+s_]]|Cack[s_*E+ep[tgt[s_]*S+s_]])&ALL)==ALL)
proctype Monitor() {
  timeout; SEEN(15); CHECK(32,OK(0));
#if S>1
  CHECK(32,OK(1))
#endif
#ifdef RULES
  if :: (OLD_ALIVE && NEW_ALIVE) -> SEEN(28) :: else fi; CHECK(256,tgt[0]==WANTED)
#endif
}
init { atomic { CX[0]=1; Sok[0]=1; up[0]=1; up[1]=1; run Member(0,0); run Member(1,0); run Host(0); run Host(1); run Server(0); run Monitor();
#ifdef RULES
  dirty[0]=1; dirty[1]=1; if :: ver[0]=0 :: ver[0]=1 fi; if :: ver[1]=0 :: ver[1]=1 fi; hb[0]=1+ver[0]; hb[1]=1+ver[1];
#if MEM>2
  dirty[2]=1; if :: ver[2]=0 :: ver[2]=1 fi; hb[2]=1+ver[2]; run Planner(2);
#endif
  run Planner(0); run Planner(1);
#else
  run Plan(0);
#endif
#if S>1
  CX[1]=1; Sok[1]=1; tgt[1]=1; pl[S]=1; pl[1]=0; run Member(0,1); run Member(1,1); run Server(1); run Plan(1);
#endif
#if MEM>2
  up[2]=1; run Member(2,0); run Host(2);
#endif
#if BL>0
  run Bucket(0)
#endif
} }
